"""From what a user asks for to a planner: model, batch and device checked, costs and the step's specification made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup._allocation import available_bytes, available_host_bytes
from recoup._collector import few_full_collections
from recoup.capture.optimizer import OptimizerLike, check_optimizer
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.cost.caching_allocator import MIN_BLOCK_BYTES
from recoup.cost.devices import Device, get_device
from recoup.cost.library_memory import library_bytes
from recoup.cost.measured import MeasuredCost
from recoup.cost.model import CostModel
from recoup.cost.roofline import RooflineCost
from recoup.errors import UsageError
from recoup.planner.driver import Planner
from recoup.planner.fitting import Fitting, paths_below
from recoup.planner.host_calibration import host_costs
from recoup.planner.incumbents import EFFORTS, Effort
from recoup.planner.strategies.registry import check_actions
from recoup.runtime.conflicts import refuse_conflicts, refuse_no_module, refuse_unready, refuse_wrapped
from recoup.units import parse_bytes

_AUTO_SHARE = 0.92  # share of the free bytes that "auto" takes: the rest is for what is allocated while training


def _target(model: nn.Module, device: str | torch.device | None) -> tuple[str, Device | None, torch.device | None]:
    """Returns the device's name, its table entry (None: this machine's own), and the device to measure on."""
    own = next(model.parameters()).device if any(True for _ in model.parameters()) else torch.device("cpu")
    if device is None or (str(device) == "cuda" and own.type == "cuda"):
        device = "cpu" if own.type == "meta" else own  # of several GPUs the one that the model is on
    name = str(device)
    if name == "cpu":
        return "cpu", None, torch.device("cpu")
    if name.split(":")[0] == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                "device='cuda' measures on the GPU of this machine, and there is none. Name the one to plan for, "
                "for instance device='a100-80gb'."
            )
        return name, None, torch.device(name)
    entry = get_device(name)
    return entry.name, entry, None


@few_full_collections()
def planner_for(
    model: nn.Module,
    batch: Any,
    *,
    objective: Objective,
    optimizer: OptimizerLike | None,
    device: str | torch.device | None,
    actions: Sequence[str] | None,
    cost: CostModel | None,
    host_budget: int | str | None = None,
    keep: frozenset[str] = frozenset(),
    effort: Effort = "normal",
) -> tuple[Planner, str, Device | None]:
    """Returns the planner of a step, the device's name, and its table entry (None: this machine's own).

    Raises:
        UsageError: for input that cannot be used.
        ConflictError: if activation checkpointing is on already.
    """
    refuse_no_module(model)
    check_optimizer(optimizer)
    if effort not in EFFORTS:
        raise UsageError(f"effort is one of {', '.join(EFFORTS)}; got {effort!r}.")
    chosen = check_actions(actions)
    host_budget_bytes = None if host_budget is None else parse_bytes(host_budget)
    if host_budget is not None and chosen is not None and "offload" not in chosen:
        raise UsageError(
            f"host_budget={host_budget!r} is for what plans move to the host, and actions={chosen} moves nothing. Add "
            "'offload' to the actions, or leave one of the two out."
        )
    name, entry, here = _target(model, device)
    refuse_wrapped(model)
    refuse_conflicts(model)
    refuse_unready(model, batch)
    on_cuda = (entry.dialect if entry is not None else name.split(":")[0]) == "cuda"
    spec = StepSpec(
        model=model,
        batch=batch,
        objective=objective,
        optimizer=optimizer,
        dialect="cuda" if on_cuda else "cpu",
        capability=entry.capability if entry is not None else None,
        round_bytes=entry.round_bytes if entry is not None else (MIN_BLOCK_BYTES if on_cuda else 1),
        keep=keep,
    )
    if cost is None:
        if entry is not None:
            cost = RooflineCost(entry)
        else:
            cost = MeasuredCost(here or torch.device("cpu"), host_costs=host_costs())
    if entry is not None:
        fixed_bytes = entry.fixed_bytes
    else:
        fixed_bytes = library_bytes(here) if on_cuda and here is not None else 0
    planner = Planner(
        spec,
        cost=cost,
        actions=chosen,
        host_budget_bytes=host_budget_bytes,
        fixed_bytes=fixed_bytes,
        remembers=True,
        effort=effort,
        card_free_bytes=_card_free_bytes(name, entry) if on_cuda else None,
        expandable=here is not None and here.type == "cuda" and _torch.has_expandable_segments(),
    )
    return planner, name, entry


def free_bytes_on(name: str, entry: Device | None) -> int:
    """Returns the bytes that `budget="auto"` means: those free on the device, less a margin."""
    if entry is not None:
        return _card_free_bytes(name, entry) if entry.dialect == "cuda" else int(entry.memory_bytes * _AUTO_SHARE)
    free = _card_free_bytes(name, None) if name.startswith("cuda") else available_host_bytes()
    return int(free * _AUTO_SHARE)


def _card_free_bytes(name: str, entry: Device | None) -> int:
    """Returns the bytes that torch may reserve on a card in all."""
    if entry is not None:
        return entry.memory_bytes - entry.context_bytes
    device = torch.device(name)
    # What torch has reserved is its own to use again; the model in it counts in the plan's peak.
    return available_bytes(device) + torch.cuda.memory_allocated(device)


def fitting_for(
    model: nn.Module,
    batch: Any,
    *,
    budget: int | str,
    objective: Objective,
    optimizer: OptimizerLike | None,
    device: str | torch.device | None,
    actions: Sequence[str] | None,
    cost: CostModel | None,
    host_budget: int | str | None,
    keep: Iterable[str],
    effort: Effort,
) -> Fitting:
    """Returns a planner for one budget that plans again without modules that turn out not to run twice."""
    refuse_no_module(model)
    kept = paths_below(model, keep)
    first, name, entry = planner_for(
        model,
        batch,
        objective=objective,
        optimizer=optimizer,
        device=device,
        actions=actions,
        cost=cost,
        host_budget=host_budget,
        keep=kept,
        effort=effort,
    )

    def make_planner(runs_once: frozenset[str], allowed: Sequence[str] | None) -> Planner:
        if (runs_once, allowed) == (kept, actions):
            return first
        spec = dataclasses.replace(first.spec, keep=runs_once)
        return Planner(
            spec,
            cost=first.cost,
            actions=allowed,
            host_budget_bytes=first.host_budget_bytes,
            fixed_bytes=first.fixed_bytes,
            card_free_bytes=first.card_free_bytes,
            expandable=first.expandable,
            remembers=True,
            effort=effort,
        )

    return Fitting(
        model=model,
        make_planner=make_planner,
        budget=budget,
        free_bytes=free_bytes_on(name, entry),
        device=name,
        keep=kept,
        actions=actions,
    )
