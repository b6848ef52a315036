"""Identity of the model that a plan is for: module paths, classes, parameter shapes and dtypes."""

from __future__ import annotations

import hashlib

from torch import nn

from recoup import _torch
from recoup.errors import PlanMismatch, UsageError
from recoup.ir.plan import Plan
from recoup.runtime.apply import find_patches
from recoup.runtime.conflicts import refuse_no_module


def structure_of(model: nn.Module) -> dict[str, str]:
    """Returns the parts of the fingerprint: a line for each module and parameter, by path."""
    lines = {path or "(model)": type(module).__name__ for path, module in model.named_modules()}
    for path, parameter in model.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        lines[path] = f"{dtype} {list(parameter.shape)}"
    return lines


def fingerprint(model: nn.Module) -> str:
    """Returns a short hash of the model's structure; weights, device and train/eval flags do not count."""
    text = "\n".join(f"{path}: {what}" for path, what in structure_of(model).items())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def refuse_other_model(model: nn.Module, plan: Plan, *, may_be_sharded: bool = False) -> None:
    """Refuses a plan that was made for another model, saying what differs.

    Args:
        may_be_sharded: a model of distributed tensors, whose plan knows a rank's own parts, is taken as it is.

    Raises:
        UsageError: for what is no plan.
        PlanMismatch: if parameters' shapes or dtypes, or the structure outside of planned modules, are others.
    """
    refuse_no_module(model)
    if not isinstance(plan, Plan):
        raise UsageError(
            f"plan must be a recoup.Plan (`fit.plan`, or `recoup.Plan.load(path)`); got {type(plan).__name__}."
        )
    if find_patches(model):
        return  # asked when a plan was put in place, perhaps before the model was sharded and its classes renamed
    if may_be_sharded and any(_torch.is_wrapper_type(type(p)) for p in model.parameters()):
        return
    found = fingerprint(model)
    if found != plan.fingerprint:
        structure = structure_of(model)
        missing = [path for path, _ in plan.structure if path and path not in structure]
        changed = [
            f"`{path}` is {structure[path]}, was {kind}"
            for path, kind in plan.structure
            if path in structure and structure[path] != kind
        ]
        if missing:
            what = f"it has no `{missing[0]}`"
        elif changed:
            what = changed[0]
        elif type(model).__name__ != plan.model_class:
            what = f"it is a {type(model).__name__}, the plan is for a {plan.model_class}"
        else:
            what = "parameter shapes, dtypes or modules outside the planned ones differ"
        raise PlanMismatch(
            f"This plan was made for another model (structure {plan.fingerprint}, this one {found}): {what}. "
            "Make a plan for this model."
        )
