"""Mixed precision as trainers apply it: forward under autocast, its outputs in float32, backward outside of it."""

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
    """Wraps the model's forward in a context inside of the block, so that a step is planned as it will be trained.

    A plan that is applied inside stays in place afterwards, without the wrapper. A model that accelerate has prepared
    is not changed, since its forward has its precision already; neither is one with a plan at its root.

    Args:
        model: the model.
        context: returns a new context for each forward.
        finish: applied to the result of forward.
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
    """Wraps the model's forward in autocast inside of the block.

    Args:
        model: the model.
        dtype: dtype of autocast; None: nothing is changed.
        finish: applied to the result of forward: accelerate's and the Trainer's `convert_to_fp32`, whose copies of
            low-precision outputs (the logits) count in the peak.
    """
    if dtype is None:
        yield
        return
    device = next(model.parameters()).device.type
    with forward_under(model, lambda: torch.autocast(device, dtype), finish or (lambda output: output)):
        yield
