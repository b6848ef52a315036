"""Ctrl-C ends what it lands in, and nothing is half done where it does."""

from __future__ import annotations

import contextlib
import contextvars
import signal
import sys
import threading
from collections.abc import Callable, Iterator
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


class _Pressed:
    """The interrupts that wait for a moment at which torch can be left.

    Under a dispatch mode, torch asks Python questions from C++ that must not raise: an interrupt there aborts the
    process (torch 2.13). So it waits for the next op to come to a mode of ours; a second one does not wait.

    Attributes:
        num_blocks: in how many blocks that run steps under modes this is.
        events: what waits.
    """

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler
        self.num_blocks = 0
        self.events: list[Any] = []

    def __call__(self, *event: Any) -> None:
        if self.events or not self.num_blocks:
            self.events.clear()
            self.handler(*event)
        else:
            self.events.append(event)


waiting: contextvars.ContextVar[_Pressed | None] = contextvars.ContextVar("recoup_pressed", default=None)


def let_in() -> None:
    """Has an interrupt that waits end what runs now."""
    pressed = waiting.get()
    if pressed is not None and pressed.events:
        pressed.handler(*pressed.events.pop())


@contextlib.contextmanager
def under_modes() -> Iterator[None]:
    """Has Ctrl-C wait for `let_in`, inside of `heard`."""
    pressed = waiting.get()
    if pressed is None:
        yield
        return
    pressed.num_blocks += 1
    try:
        yield
    finally:
        pressed.num_blocks -= 1
    let_in()


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if waiting.get() is not None or not is_main or not callable(handler):
        yield
        return
    pressed = _Pressed(handler)
    token = waiting.set(pressed)
    signal.signal(signal.SIGINT, pressed)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        waiting.reset(token)
        if pressed.events:
            handler(*pressed.events.pop())


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Has Ctrl-C end the block, at its end at the latest, also where it lands in somebody's finaliser.

    Python prints what is raised there (torch's weak dictionaries have such) and goes on. What is noted here is a list's
    `append`, so that no Python runs that could be interrupted again; all but interrupts is printed afterwards.
    """
    before, raised = sys.unraisablehook, list[Any]()
    sys.unraisablehook = raised.append
    try:
        with _waiting():
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
