"""One training step the way the design defines it: call the model, take the loss, backward, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from recoup._pytree import iterate_tensors
from recoup.errors import StepError

Loss = Callable[[Any, Any], torch.Tensor]


def call_model(model: nn.Module, batch: Any) -> Any:
    """Returns `model(**batch)` for a dict, `model(*batch)` for a tuple or list, `model(batch)` for anything else."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return model(*batch)
    return model(batch)


def loss_of(output: Any, batch: Any, loss: Loss | None) -> tuple[torch.Tensor, str]:
    """Returns the scalar to differentiate, and in words where it came from.

    Raises:
        StepError: if there is nothing to take, or it is no scalar, or it has no gradient.
    """
    if loss is not None:
        value, source = loss(output, batch), "the given loss function"
    elif isinstance(getattr(output, "loss", None), torch.Tensor):
        value, source = output.loss, "output.loss"
    elif isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
        value, source = output["loss"], 'output["loss"]'
    elif isinstance(output, torch.Tensor) and output.numel() == 1:
        value, source = output, "the scalar output"
    else:
        floating = [t for t in iterate_tensors(output) if t.is_floating_point() and t.requires_grad]
        if not floating:
            raise StepError(
                f"The model returned {type(output).__name__} without a floating tensor that needs a gradient; there "
                "is nothing to differentiate. Give loss=..., or unfreeze a parameter."
            )
        value = sum((t.mean() for t in floating[1:]), floating[0].mean())
        source = "the mean of all floating outputs (no loss was given)"
    if not isinstance(value, torch.Tensor):
        raise StepError(f"The loss is a {type(value).__name__}; it must be a scalar tensor.")
    if value.numel() != 1:
        raise StepError(f"The loss has shape {list(value.shape)}; it must be a scalar. Take its mean or sum.")
    if not value.requires_grad:
        raise StepError("The loss has no gradient: every parameter is frozen, or the graph was cut (detach, no_grad).")
    return value, source


def leaves_of(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors that backward from `loss` gives a gradient, whoever they belong to."""
    todo, seen = [loss.grad_fn], {loss.grad_fn}
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        for below, _ in node.next_functions if node is not None else ():
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)
