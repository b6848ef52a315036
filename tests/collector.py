"""Tests of what is left behind: Python's collector rests, and only what is made from here on is counted."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def resting() -> Iterator[None]:
    """Collects what there is to collect, then turns the collector off, for the block.

    What is there before is frozen: other tests of the process have left a million objects, and `live_tensors` would
    look at each of them every time.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def live_tensors() -> int:
    """Returns how many tensors are alive that the collector knows of."""
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
