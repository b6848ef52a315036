"""The user's optimizer, rebuilt over other parameters: its state and its step's transients without touching it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from recoup.errors import UsageError

OptimizerLike = torch.optim.Optimizer | type[torch.optim.Optimizer]


def check_optimizer(optimizer: Any) -> None:
    """Raises UsageError unless it is an optimizer or an optimizer class."""
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return
    raise UsageError(
        f"optimizer must be a torch.optim.Optimizer or such a class; got {type(optimizer).__name__}. "
        "Pass e.g. optimizer=torch.optim.AdamW."
    )


def rebuild_optimizer(
    optimizer: OptimizerLike, new_of: Mapping[int, nn.Parameter], parameters: list[nn.Parameter], *, foreach: bool
) -> torch.optim.Optimizer:
    """Returns an optimizer of the same kind over other parameters, with no state yet.

    Args:
        optimizer: an instance (its groups and settings are taken over) or a class (its defaults).
        new_of: new parameter by `id` of the old one. parameters: all new ones, for a class.
        foreach: use the multi-tensor implementation where the user left the choice open, as torch does on CUDA.
    """
    if isinstance(optimizer, type):
        wanted = [p for p in parameters if p.requires_grad]
        accepted = inspect.signature(optimizer).parameters
        options: dict[str, Any] = {}
        if "lr" in accepted and accepted["lr"].default is inspect.Parameter.empty:
            options["lr"] = 1e-3
        if foreach and "foreach" in accepted:
            options["foreach"] = True
        return optimizer(wanted, **options)
    groups = []
    for group in optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k != "params"}
        if foreach and settings.get("foreach", False) is None and not settings.get("fused"):
            settings["foreach"] = True
        members = [new_of[id(p)] for p in group["params"] if id(p) in new_of]
        if members:
            groups.append({"params": members, **settings})
    if not groups:
        raise UsageError(
            f"None of the {type(optimizer).__name__}'s parameters belong to the model. Build it from its parameters()."
        )
    rebuilt = object.__new__(type(optimizer))
    torch.optim.Optimizer.__init__(rebuilt, groups, dict(optimizer.defaults))
    for name, value in optimizer.__dict__.items():
        rebuilt.__dict__.setdefault(name, value)
    return rebuilt
