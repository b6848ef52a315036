"""Mixed precision as trainers do it: forward under autocast, backward outside of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recoup.engine.patch import PatchedForward


@contextlib.contextmanager
def autocast_forward(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Runs the model's forward under autocast inside the block, so that a step is planned as it will be trained.

    A plan that is applied inside stays, and is as if it had been applied without this.

    Args:
        dtype: of autocast; None: changes nothing.
    """
    if dtype is None or "forward" in model.__dict__:  # prepared already: its forward has the precision in it
        yield
        return
    device = next(model.parameters()).device.type

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype):
            return type(model).forward(model, *args, **kwargs)

    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        current = model.__dict__.get("forward")
        if isinstance(current, PatchedForward):
            while isinstance(current.previous, PatchedForward):
                current = current.previous
            current.previous = None
        else:
            model.__dict__.pop("forward", None)
