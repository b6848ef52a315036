"""What runs on one tile is seen by nobody around it: no record of rederive's, no saved tensor of the step's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from recoup import _torch
from recoup.runtime import execution_context
from recoup.runtime.rebuild.kept import kept_simply, unpacked
from recoup.runtime.rebuild.lineage import current_recorder


@runtime_checkable
class Repeating(Protocol):
    """An observer that can note what a tile did without its being run, as the capture's does."""

    def place(self) -> Any:
        """Returns how far it has come."""

    def repeat(self, places: Sequence[Any], times: int) -> bool:
        """Notes so many tiles more like the last one, if the last two were alike; whether it did."""


def each_tile(starts: Sequence[int]) -> Iterator[int]:
    """Yields where tiles begin; in a capture of fake tensors three of them and the last, if all others are alike.

    Or four: where a tile reads what the one before it made, the second reads of the first, which made other things too.
    """
    observer = execution_context.observer()
    if observer is None or not isinstance(observer, Repeating):
        yield from starts
        return
    places, at = [observer.place()], 0
    while at < len(starts):
        yield starts[at]
        places.append(observer.place())
        at += 1
        left = len(starts) - 1 - at  # the last may be smaller, and is run
        if at in (3, 4) and left > 0 and observer.repeat(places, left):
            at += left


@contextlib.contextmanager
def inside_tile(*, keeps: bool = False) -> Iterator[None]:
    """Runs a tile's forward, seen by nobody around it.

    With grad, also where nothing is kept: under autocast a weight's cast is cached, and one that was made without grad
    would be found there by whoever uses the weight next.
    """
    recorder = current_recorder()
    if recorder is not None:
        recorder.paused += 1
    pack: Callable[[torch.Tensor], Any] = kept_simply if keeps else (lambda t: None)
    try:
        with (
            execution_context.in_tile(),
            torch.enable_grad(),
            _torch.saved_tensors_hooks(pack, unpacked),
        ):
            yield
    finally:
        if recorder is not None:
            recorder.paused -= 1
