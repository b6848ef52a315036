"""Do you need activation checkpointing at all, and which: five lines, from the numbers."""

from __future__ import annotations

from typing import Any

from torch import nn

from recoup.api import Frontier, frontier
from recoup.errors import InfeasibleBudget
from recoup.ir.decision import Rederive, Save, describe_decisions, kinds
from recoup.ir.plan import Plan
from recoup.selective.config import CheckpointConfig
from recoup.selective.layers import find_layers
from recoup.selective.strategies import choose
from recoup.units import format_bytes, format_flops


def advise(model: nn.Module, batch: Any = None, *, budget: int | str, **step: Any) -> str:
    """Returns five lines: whether the budget needs a plan, which, what it costs, hand-made ones, what is left.

    Args:
        model: as for `recoup.plan`.
        batch: as for `recoup.plan`.
        budget: as for `recoup.plan`; one below the smallest reachable peak is reported instead of raised.
        step: other arguments of the training step, as for `recoup.frontier`.

    Raises:
        UsageError, StepError, ConflictError: as `recoup.plan`.
    """
    curve = frontier(model, batch, num_points=2, **step)
    try:
        plan = curve.plan(budget)
    except InfeasibleBudget as error:
        held = ", ".join(f"{name} ({format_bytes(size)})" for name, size in error.tensors[:2])
        return _lines(
            ("a plan", f"none reaches it: {error!s}"),
            ("what is left", held),
            ("so", "a smaller batch or sequence, a leaner optimizer or dtype, or sharding"),
        )
    predicted = plan.predicted
    plain = format_bytes(predicted.plain_peak_bytes)
    asked = format_bytes(plan.budget_bytes)
    if not plan.decisions:
        return _lines(
            ("a plan", f"not needed: the plain step peaks at {plain}, within {asked}"),
            ("so", "it would cost time and buy nothing, unless you raise the batch: then ask again (recoup.max_batch)"),
        )
    over = format_bytes(predicted.plain_peak_bytes - plan.budget_bytes)
    return _lines(
        ("a plan", f"needed: the plain step peaks at {plain}, {over} over {asked}"),
        ("which", _what(plan)),
        (
            "it costs",
            f"{100 * max(0.0, predicted.extra_time_ratio):.1f} % more time, {format_flops(predicted.recomputed_flops)} "
            f"run twice; peak {format_bytes(predicted.peak_bytes)} ({predicted.cost_source})",
        ),
        ("by hand", _by_hand(curve, plan)),
        ("then", f"the {predicted.phase} sets the peak, most of it {predicted.tensors[0][0]}"),
    )


def _lines(*rows: tuple[str, str]) -> str:
    return "\n".join(f"{name:<13}{text}" for name, text in rows if text)


def _what(plan: Plan) -> str:
    num_regions = len(plan.regions)
    others = [d for d in plan.decisions if not d.is_region and not isinstance(d, Save | Rederive)]
    rederives = any(isinstance(d, Rederive) or (d.is_region and d.rederives) for d in plan.decisions)
    if not num_regions and not others:
        return "rederiving is enough: cheap ops' results are rebuilt, no matmul or attention runs twice"
    said = [f"recompute {num_regions} region{'s' if num_regions > 1 else ''} of the {plan.model_class}"]
    said = (said if num_regions else []) + [describe_decisions(kind)[0] for kind in kinds(others)]
    return ", and ".join([*said, "rederive cheap ops' results"] if rederives else said)


def _by_hand(curve: Frontier, plan: Plan) -> str:
    """Compares with checkpointing each repeated block, the usual first try, by the same simulation."""
    planner = curve.planner
    everywhere = planner.simulate((Rederive(path=""),))
    options = [("rederive everywhere alone", everywhere)]
    model = planner.spec.model
    if find_layers(model):
        by_block = choose(CheckpointConfig(strategy="full"), model, None).decisions
        options.append(("checkpointing every block", planner.simulate(by_block)))
    said = []
    for name, candidate in options:
        if candidate.decisions == plan.decisions:
            continue
        fits = "fits" if candidate.peak_bytes <= plan.budget_bytes else "does not fit"
        extra = candidate.step_seconds / planner.plain.step_seconds - 1
        said.append(f"{name} {fits} ({format_bytes(candidate.peak_bytes)}, {100 * max(0.0, extra):+.1f} % time)")
    return "; ".join(said)
