"""Ctrl-C ends what it lands in, and nothing is half done where it does."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Has Ctrl-C wait until the block is over."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed: list[Any] = []
    signal.signal(signal.SIGINT, lambda *event: pressed.append(event))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            handler(*pressed[0])


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Has Ctrl-C end the block at its end at the latest, also where it lands in somebody's finaliser.

    Python prints what is raised there (torch's weak dictionaries have such) and goes on. What is noted here is a list's
    `append`, so that no Python runs that could be interrupted again; all but interrupts is printed afterwards.
    """
    before, raised = sys.unraisablehook, list[Any]()
    sys.unraisablehook = raised.append
    try:
        yield
    finally:
        sys.unraisablehook = before
        interrupts = [u.exc_value for u in raised if isinstance(u.exc_value, KeyboardInterrupt)]
        for one in raised:
            if not isinstance(one.exc_value, KeyboardInterrupt):
                before(one)
        raised.clear()
        if interrupts:
            raise interrupts[0]
