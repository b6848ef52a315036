"""Do you need activation checkpointing at all, and which: one paragraph, from the numbers."""

from __future__ import annotations

from typing import Any

from torch import nn

from recoup.api import Frontier, frontier
from recoup.capture.optimizer import OptimizerLike
from recoup.capture.step import Loss
from recoup.errors import InfeasibleBudget
from recoup.ir.decision import Rederive
from recoup.ir.plan import Plan
from recoup.selective.config import CheckpointConfig
from recoup.selective.layers import find_layers
from recoup.selective.strategies import choose
from recoup.units import format_bytes, format_flops


def advise(
    model: nn.Module,
    batch: Any,
    *,
    budget: int | str,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    device: str | None = None,
) -> str:
    """Returns one paragraph: whether the budget needs a plan, which, what it costs, and what hand-made ones would.

    Args and errors are those of `recoup.plan`; a budget below the smallest reachable peak is said, not raised.
    """
    curve = frontier(model, batch, loss=loss, optimizer=optimizer, device=device, num_points=2)
    try:
        plan = curve.plan(budget)
    except InfeasibleBudget as error:
        return (
            f"No: {error!s} Recomputing everything does not get there; what is left is "
            f"{', '.join(f'{name} ({format_bytes(size)})' for name, size in error.tensors[:2])}, which needs a smaller "
            "batch or sequence, a leaner optimizer or dtype, or sharding."
        )
    predicted = plan.predicted
    plain = format_bytes(predicted.plain_peak_bytes)
    asked = format_bytes(plan.budget_bytes)
    if not plan.decisions:
        return (
            f"You do not need activation checkpointing: the plain step peaks at {plain}, within {asked}. It would "
            "cost time and buy nothing, unless you raise the batch: then ask again, or use recoup.max_batch."
        )
    parts = [
        f"Yes: the plain step peaks at {plain} ({format_bytes(predicted.plain_saved_bytes)} of it held for backward), "
        f"{format_bytes(predicted.plain_peak_bytes - plan.budget_bytes)} over {asked}.",
        f"{_what(plan)} It brings the peak to {format_bytes(predicted.peak_bytes)} for "
        f"{100 * max(0.0, predicted.extra_time_ratio):.1f} % more time and "
        f"{format_flops(predicted.recomputed_flops)} run twice ({predicted.cost_source}).",
        _by_hand(curve, plan),
        f"After it the {predicted.phase} sets the peak, most of it {predicted.tensors[0][0]}.",
    ]
    return " ".join(part for part in parts if part)


def _what(plan: Plan) -> str:
    num_regions = len(plan.regions)
    rederives = any(d.rederives for d in plan.decisions)
    if not num_regions:
        return "Rederiving is enough: cheap ops' results are rebuilt, no matmul or attention runs twice."
    also = ", and rederive cheap ops' results" if rederives else ""
    return f"Recompute {num_regions} region{'s' if num_regions > 1 else ''} of the {plan.model_class}{also}."


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
    text = "; ".join(said)
    return f"By hand: {text}." if text else ""
