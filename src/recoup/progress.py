"""Says what is being done, to whoever listens; silent otherwise. No torch."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

Listener = Callable[[str], None]
_listener: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("recoup_progress", default=None)


def advance(text: str) -> None:
    """Tells the listener what is being done now."""
    listener = _listener.get()
    if listener is not None:
        listener(text)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Has `listener` called with each text while the block runs."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
