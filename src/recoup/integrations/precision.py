"""Mixed precision as trainers do it: forward under autocast, its results in float32, backward outside of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from recoup.runtime.patch import PatchedForward


@contextlib.contextmanager
def forward_under(
    model: nn.Module, context: Callable[[], contextlib.AbstractContextManager[Any]], finish: Callable[[Any], Any]
) -> Iterator[None]:
    """Runs the model's forward in a context inside the block, so that a step is planned as it will be trained.

    A plan that is applied inside stays, and is as if it had been applied without this. A model that accelerate has
    prepared is left alone, its precision is in its forward; so is one with a plan at its root.

    Args:
        context: makes what is entered around forward.
        finish: what is done to forward's result before it is returned.
    """
    own = model.__dict__.get("forward")  # TRL puts one there
    if "_original_forward" in model.__dict__ or isinstance(own, PatchedForward):
        yield
        return
    inner = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with context():
            output = inner(*args, **kwargs)
        return finish(output)

    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        current = model.__dict__.get("forward")
        if isinstance(current, PatchedForward):
            while isinstance(current.previous, PatchedForward):
                current = current.previous
            current.previous = own
        elif own is not None:
            model.__dict__["forward"] = own
        else:
            model.__dict__.pop("forward", None)


@contextlib.contextmanager
def autocast_forward(
    model: nn.Module, dtype: torch.dtype | None, *, finish: Callable[[Any], Any] | None = None
) -> Iterator[None]:
    """Runs the model's forward under autocast inside the block, and `finish` on its result.

    Args:
        dtype: of autocast; None: changes nothing.
        finish: accelerate's and the Trainer's `convert_to_fp32`, which makes a copy of every low-precision output (the
            logits) that counts in the peak.
    """
    if dtype is None:
        yield
        return
    device = next(model.parameters()).device.type
    with forward_under(model, lambda: torch.autocast(device, dtype), finish or (lambda output: output)):
        yield
