"""The nesting of regions on a thread: depth, whether in a replay, open spans."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from recoup.runtime.recompute.frame import Frame


class _Scope(threading.local):
    """This thread's position: `depth` regions deep in a first forward, or in a replay.

    `spans` has the open frame of each span, None before the first. A frame lives as long as a graph needs it; a replay
    opens its own. Where no graph needs a frame yet, its last output holds it.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.in_replay = False
        self.spans: weakref.WeakValueDictionary[int, Frame] | None = None
        self._unsaved: dict[int, tuple[weakref.ref[torch.Tensor], Frame]] = {}

    def open_frame(self, span: object) -> Frame | None:
        """Returns the open frame of a span; None if there is none."""
        return None if self.spans is None else self.spans.get(id(span))

    def open_span(self, span: object, frame: Frame) -> None:
        """Makes `frame` the open one of a span."""
        if self.spans is None:
            self.spans = weakref.WeakValueDictionary()
        self.spans[id(span)] = frame

    def hold_open(self, span: object, frame: Frame, output: torch.Tensor) -> None:
        """Has the frame of a span in whose calls so far nothing was saved (frozen ones) live on with their output."""
        key, unsaved = id(span), self._unsaved

        def let_go(ref: weakref.ref[torch.Tensor]) -> None:
            if key in unsaved and unsaved[key][0] is ref:
                del unsaved[key]

        unsaved[key] = weakref.ref(output, let_go), frame


scope = _Scope()


class replaying:
    """Context manager of a replay: no region around it, and no span open."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        here = scope
        self._before = here.depth, here.in_replay, here.spans
        here.depth, here.in_replay, here.spans = 0, True, None

    def __exit__(self, *exc: Any) -> None:
        here = scope
        here.depth, here.in_replay, here.spans = self._before


def inside_region() -> bool:
    """Whether a region runs or is replayed, so that its saved-tensor hooks are the active ones."""
    return scope.depth > 0 or scope.in_replay
