"""What runs on one tile is seen by nobody around it: no record of rederive's, no saved tensor of the step's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from recoup import _torch
from recoup.runtime import execution_context
from recoup.runtime.rebuild.lineage import current_recorder


@contextlib.contextmanager
def inside_tile(*, keeps: bool = False) -> Iterator[None]:
    """Runs a tile's forward, seen by nobody around it.

    With grad, also where nothing is kept: under autocast a weight's cast is cached, and one that was made without grad
    would be found there by whoever uses the weight next.
    """
    recorder = current_recorder()
    if recorder is not None:
        recorder.paused += 1
    pack: Callable[[torch.Tensor], Any] = (lambda t: t) if keeps else (lambda t: None)
    try:
        with (
            execution_context.in_tile(),
            torch.enable_grad(),
            _torch.saved_tensors_hooks(pack, lambda t: t),
        ):
            yield
    finally:
        if recorder is not None:
            recorder.paused -= 1
