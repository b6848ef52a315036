"""Says what is being done, to whoever listens: a command line, a notebook's output, the logger "recoup". No torch."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Listener = Callable[[str], None]
_listener: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("recoup_progress", default=None)
_stage: contextvars.ContextVar[str] = contextvars.ContextVar("recoup_stage", default="")
_logger = logging.getLogger("recoup")  # of a library: what it says is shown where the user set a handler and INFO


def advance(text: str) -> None:
    """Tells the listener what is being done now; the logger "recoup" always, with level INFO."""
    text = _stage.get() + text
    _logger.info("%s", text)
    listener = _listener.get()
    if listener is not None:
        listener(text)


class Remaining:
    """Says which of several parts is next and, from the time that those before it took, how long the rest may take.

    Args:
        of: number of parts, taken to be equally long.
        clock: returns seconds.
    """

    def __init__(self, of: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._of, self._clock, self._begun = of, clock, clock()

    def text(self, number: int, *, done: int) -> str:
        """Returns "2 of 5", with ", about 12 s left" where some parts are done and a second or more is left."""
        left = (self._clock() - self._begun) / done * (self._of - done) if done else 0.0
        return f"{number} of {self._of}" + (f", about {left:.0f} s left" if left >= 1.0 else "")


@contextlib.contextmanager
def stage(name: str, number: int, remaining: Remaining) -> Iterator[None]:
    """Has what is done in the block told as part of one of several stages: "search 2 of 5, about 12 s left: ..."."""
    token = _stage.set(f"{_stage.get()}{name} {remaining.text(number, done=number - 1)}: ")
    try:
        yield
    finally:
        _stage.reset(token)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Has `listener` called with each text while the block runs."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextlib.contextmanager
def showing_in_notebook() -> Iterator[None]:
    """Shows what is being done as one line of a notebook's output that changes and is empty afterwards.

    Elsewhere, and where somebody listens already, nothing happens.
    """
    handle = _notebook_line() if _listener.get() is None else None
    if handle is None:
        yield
        return
    begun = time.monotonic()

    def show(text: str) -> None:
        handle.update({"text/plain": text}, raw=True)

    try:
        with listening(lambda text: show(f"recoup: {text} ({time.monotonic() - begun:.0f} s)")):
            yield
    finally:
        show("")


def _notebook_line() -> Any:
    """Returns a handle of an output that can be changed, None outside of a notebook; imports nothing that is not there.

    Seen with IPython 9: a kernel's shell has the attribute `kernel`, a terminal's does not.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if ipython is None or getattr(shell, "kernel", None) is None:
        return None
    return ipython.display.display({"text/plain": "recoup"}, raw=True, display_id=True)
