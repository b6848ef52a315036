"""One training step the way the design defines it: call the model, take the loss, backward, optimizer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from recoup._interrupts import let_in
from recoup._pytree import iterate_tensors
from recoup.errors import StepError, UsageError

Loss = Callable[[Any, Any], torch.Tensor]
"""`loss(output, batch)` returns a scalar; with `inputs=` and `targets=`, `loss(output, targets)`."""
StepFunction = Callable[[nn.Module, Any], torch.Tensor]
"""`step(model, batch)` calls the model as it likes and returns the scalar loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What one training step computes: from a model and a batch to the scalar that backward begins at.

    Attributes:
        loss: `loss(output, batch)`; None: the loss is found in the output.
        step: `step(model, batch)`, in place of the model's call and the loss.
        is_paired: the batch is a dict of `inputs`, for the model, and `targets`, for the loss.
        autocast: the dtype of a `torch.autocast` around forward and loss; None: none but the caller's.
        scale: factor on the loss before backward.
        accumulates: gradients of earlier micro-batches are there when forward begins.
    """

    loss: Loss | None = None
    step: StepFunction | None = None
    is_paired: bool = False
    autocast: torch.dtype | None = None
    scale: float = 1.0
    accumulates: bool = False

    @property
    def functions(self) -> tuple[Any, ...]:
        """The user's own code besides the model."""
        return (self.loss, self.step)

    def autocasting(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Returns the context that forward and loss run in."""
        if self.autocast is None:
            return contextlib.nullcontext()
        kind = next((p.device.type for p in model.parameters()), "cpu")
        return torch.autocast("cpu" if kind == "meta" else kind, dtype=self.autocast)

    def prepare(self, model: nn.Module) -> list[torch.Tensor]:
        """Gives parameters the gradients that forward finds there; returns them."""
        if not self.accumulates:
            return []
        trainable = [p for p in model.parameters() if p.requires_grad]
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter)
        return [p.grad for p in trainable if p.grad is not None]

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Returns the model's output, or the loss where a `step` computes it."""
        if self.step is not None:
            return self.step(model, batch)
        return call_model(model, batch["inputs"] if self.is_paired else batch)

    def loss_of(self, output: Any, batch: Any) -> tuple[torch.Tensor, str]:
        """Returns the scalar to differentiate, and in words where it came from.

        Raises:
            StepError: if there is nothing to take, or it is no scalar, or it has no gradient.
        """
        if self.step is not None:
            value, source = output, "the given step"
            if output is None:
                raise StepError("step=... returned None; it must return the scalar loss, and leave backward to recoup.")
        elif self.loss is not None:
            value, source = self.loss(output, batch["targets"] if self.is_paired else batch), "the given loss function"
        else:
            value, source = _loss_in(output)
        if not isinstance(value, torch.Tensor):
            raise StepError(f"The loss is a {type(value).__name__}; it must be a scalar tensor.")
        if value.numel() != 1:
            raise StepError(f"The loss has shape {list(value.shape)}; it must be a scalar. Take its mean or sum.")
        if not value.requires_grad:
            raise StepError(
                "The loss has no gradient: every parameter is frozen, or the graph was cut (detach, no_grad, or a "
                "backward in the step: recoup calls it)."
            )
        return (value if self.scale == 1.0 else value * self.scale), source

    def run(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Returns the scalar of one forward; nothing of the output is held."""
        with self.autocasting(model):
            return self.loss_of(self.forward(model, batch), batch)[0]


def make_objective(
    batch: Any,
    *,
    loss: Loss | None = None,
    step: StepFunction | None = None,
    inputs: Any = None,
    targets: Any = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    accumulate: int = 1,
) -> tuple[Objective, Any]:
    """Returns what a step computes, and the batch that it computes it of.

    Raises:
        UsageError: for arguments that contradict each other or cannot be used.
    """
    for name, function, takes in (("loss", loss, "(output, batch)"), ("step", step, "(model, batch)")):
        if function is not None and not callable(function):
            raise UsageError(f"{name} must be a function of {takes}; got {type(function).__name__}.")
        if isinstance(function, type) and issubclass(function, nn.Module):
            raise UsageError(f"{name} is the class {function.__name__}; make one: {name}={function.__name__}().")
    if loss is not None and step is not None:
        raise UsageError("Give loss=... or step=..., not both: a step returns the loss itself.")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise UsageError(f"accumulate must be the number of micro-batches of one optimizer step; got {accumulate!r}.")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise UsageError(f"autocast must be torch.bfloat16 or torch.float16; got {autocast!r}.")
    is_paired = inputs is not None
    if is_paired:
        if batch is not None:
            raise UsageError("Give a batch, or inputs=... and targets=..., not both.")
        if targets is None or loss is None:
            raise UsageError(
                "inputs=... is for the model, targets=... for loss=...: give all three (loss(output, targets))."
            )
        batch = {"inputs": inputs, "targets": targets}
    elif targets is not None:
        raise UsageError("targets=... needs inputs=...: loss(model(inputs), targets) is the step then.")
    elif batch is None:
        raise UsageError("There is no batch: give one, or inputs=... and targets=....")
    for given in (inputs, targets) if is_paired else (batch,):
        if hasattr(given, "batch_sampler") or (isinstance(given, Iterator) and not isinstance(given, torch.Tensor)):
            raise UsageError(
                f"The batch is a {type(given).__name__}; recoup takes one batch of it: batch = next(iter(loader))."
            )
    scale = 1.0
    if scaler is not None:
        if isinstance(scaler, type) or not hasattr(scaler, "get_scale"):
            raise UsageError(f"scaler must be a torch.amp.GradScaler, made; got {scaler!r}.")
        scale = float(scaler.get_scale())
    objective = Objective(
        loss=loss, step=step, is_paired=is_paired, autocast=autocast, scale=scale, accumulates=accumulate > 1
    )
    return objective, batch


def call_model(model: nn.Module, batch: Any) -> Any:
    """Returns `model(**batch)` for a dict, `model(*batch)` for a tuple or list, `model(batch)` for anything else."""
    let_in()
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return model(*batch)
    return model(batch)


def _loss_in(output: Any) -> tuple[Any, str]:
    """Returns the loss that an output has in it, and where."""
    if isinstance(getattr(output, "loss", None), torch.Tensor):
        return output.loss, "output.loss"
    if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
        return output["loss"], 'output["loss"]'
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return output, "the scalar output"
    floating = [t for t in iterate_tensors(output) if t.is_floating_point() and t.requires_grad]
    if not floating:
        raise StepError(
            f"The model returned {type(output).__name__} without a floating tensor that needs a gradient; there "
            "is nothing to differentiate. Give loss=..., or unfreeze a parameter."
        )
    mean = sum((t.mean() for t in floating[1:]), floating[0].mean())
    return mean, "the mean of all floating outputs (no loss was given)"


def leaves_of(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the leaf tensors that get a gradient in backward from `loss`, parameters of the model or not."""
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
