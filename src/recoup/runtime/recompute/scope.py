"""The nesting of regions on a thread: depth, whether in a replay, open spans."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recoup.runtime.recompute.frame import Frame


class _Scope(threading.local):
    """This thread's position: `depth` regions deep in a first forward, or in a replay.

    `spans` has the open frame of each span. A frame lives as long as a graph needs it; a replay opens its own.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.in_replay = False
        self.spans: weakref.WeakValueDictionary[int, Frame] = weakref.WeakValueDictionary()

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        before = self.depth, self.in_replay, self.spans
        self.depth, self.in_replay, self.spans = 0, True, weakref.WeakValueDictionary()
        try:
            yield
        finally:
            self.depth, self.in_replay, self.spans = before


scope = _Scope()


def inside_region() -> bool:
    """Whether a region runs or is replayed, so that its saved-tensor hooks are the active ones."""
    return scope.depth > 0 or scope.in_replay
