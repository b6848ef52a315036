"""Categories of a step's storages: the model's own, gradients, the optimizer's."""

from __future__ import annotations

import torch

from recoup._storages import dense_parts
from recoup.capture.optimizer import OptimizerStep
from recoup.capture.snapshot import Snapshot
from recoup.capture.tracker import Tracker
from recoup.ir.trace import Category


def categories_of(before: Snapshot) -> dict[int, tuple[Category, str]]:
    """Returns category and name of the tensors that a step can reach, by their storages' address."""
    found: dict[int, tuple[Category, str]] = {}
    for name, tensor in before.tensors.named().items():
        if tensor.layout is torch.strided:
            found[tensor.untyped_storage()._cdata] = ("parameter" if tensor.requires_grad else "outside", name)
    return found


def step_optimizer(stepper: OptimizerStep, parameters: dict[str, torch.Tensor], tracker: Tracker) -> None:
    """Runs the optimizer's step. What it holds while its closure runs counts as present throughout the step."""
    first_op, held_bytes = len(tracker.ops), 0

    def closure() -> torch.Tensor:
        nonlocal held_bytes
        own = (s.nbytes for s in tracker.storages if s.free_op < 0 and s.alloc_op >= first_op)
        held_bytes = max(held_bytes, sum(own))
        for parameter in parameters.values():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        return torch.empty((), device=next(iter(parameters.values())).device)

    stepper.step(closure)
    tracker.add_block(held_bytes, "optimizer", "held by the optimizer while it runs the step again")


def note_gradients(parameters: dict[str, torch.Tensor], tracker: Tracker) -> list[torch.Tensor]:
    """Tells the tracker which storages are gradients; returns the gradients."""
    gradients = []
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            for index in map(tracker.find, dense_parts(parameter.grad)):
                if index is not None:
                    tracker.storages[index].category = "gradient"
                    tracker.storages[index].label = f"gradient of {name}"
            gradients.append(parameter.grad)
    return gradients
