"""The public functions that look at many budgets: profile, frontier, explain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recoup.analysis.profile import make_profile
from recoup.capture.optimizer import OptimizerLike
from recoup.capture.step import Loss, StepFunction, make_objective
from recoup.cost.model import CostModel
from recoup.ir import html
from recoup.ir.explanation import Explanation, Trade
from recoup.ir.plan import Plan
from recoup.ir.profile import FrontierPoint, Profile
from recoup.ir.text import format_percent, format_share
from recoup.planner.curve import frontier_points
from recoup.planner.driver import Planner, plan_for_budget
from recoup.planner.explain import explain as explain_plan
from recoup.planner.explain import trade
from recoup.planner.request import free_bytes_on, planner_for
from recoup.runtime.as_found import all_or_nothing
from recoup.units import check_budget, check_count, format_bytes, parse_bytes


@all_or_nothing
def profile(
    model: nn.Module,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    step: StepFunction | None = None,
    inputs: Any = None,
    targets: Any = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    accumulate: int = 1,
    optimizer: OptimizerLike | None = None,
    device: str | torch.device | None = None,
    cost: CostModel | None = None,
) -> Profile:
    """Returns memory and time of one unplanned step by module and tensor category; the model is left unchanged.

    Args:
        model, batch, loss, step, inputs, targets, autocast, scaler, accumulate, optimizer: the training step, as for
            `plan`.
        device, cost: as for `plan`.

    Raises:
        UsageError, StepError, ConflictError: as `plan`.

    Example:
        >>> model, x = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]), torch.randn(4096, 64)
        >>> recoup.profile(model, x, device="a100-80gb").phase
        'backward'
    """
    objective, batch = make_objective(
        batch,
        loss=loss,
        step=step,
        inputs=inputs,
        targets=targets,
        autocast=autocast,
        scaler=scaler,
        accumulate=accumulate,
    )
    planner, name, _ = planner_for(
        model, batch, objective=objective, optimizer=optimizer, device=device, actions=(), cost=cost
    )
    return make_profile(planner.priced, device=name, plain_peak_bytes=planner.plain.peak_bytes)


class Frontier:
    """The curve of peak bytes against step time; every point is a plan. Of bit-exact ones, more bytes are never slower.

    Tiled plans round differently: unless `actions` asks for them, they are only used for points below the smallest peak
    of all bit-exact plans.
    """

    def __init__(self, planner: Planner, device: str, points: tuple[FrontierPoint, ...], free_bytes: int) -> None:
        self._planner = planner
        self._device = device
        self._free_bytes = free_bytes
        self.points = points

    @property
    def planner(self) -> Planner:
        """The planner behind the curve, for reports: the captured steps and the simulator."""
        return self._planner

    def explain(self, budget: int | str) -> Explanation:
        """Returns what each kind of decision in a budget's plan is worth, and the plans for a bit less and more.

        Raises:
            InfeasibleBudget: as `plan`.
        """
        made = self.plan(budget)
        candidate = self._planner.simulate(made.decisions)
        return explain_plan(self._planner, candidate, budget_bytes=made.budget_bytes)

    def buys(self, budget: int | str, more: int | str) -> Trade:
        """Returns what `more` bytes on top of a budget would buy: the two plans, and the seconds between them.

        Args:
            budget: peak bytes, as for `plan`.
            more: bytes on top of it, as a number or as text ("2GiB").
        """
        first = self.plan(budget)
        second = self.plan(first.budget_bytes + parse_bytes(more))
        return trade(self._planner.simulate(first.decisions), self._planner.simulate(second.decisions))

    def free(self, wanted: int | str) -> Plan:
        """Returns the cheapest plan whose peak is at least `wanted` bytes below the plain step's.

        Raises:
            InfeasibleBudget: if no plan frees as much.
        """
        return self.plan(self._planner.plain.peak_bytes - parse_bytes(wanted))

    def plan(self, budget: int | str) -> Plan:
        """Returns the plan for a budget, without capturing again."""
        check_budget(budget)
        made, _ = plan_for_budget(self._planner, budget=budget, free_bytes=self._free_bytes, device=self._device)
        return made

    def __repr__(self) -> str:
        sizes = [format_bytes(p.peak_bytes) for p in (self.points[:1] + self.points[-1:])]
        return f"<Frontier: {len(self.points)} plans, {' to '.join(sizes)}>"

    def _repr_html_(self) -> str:
        plain = self._planner.plain
        rows = [
            (
                format_bytes(p.peak_bytes),
                format_share(p.peak_bytes, plain.peak_bytes),
                format_percent(p.extra_time_ratio),
                "" if p.is_exact else "with tiles",
            )
            for p in self.points
        ]
        title = f"{len(self.points)} plans on {self._device}"
        return html.card(title, html.table(("peak", "of plain", "time", ""), rows), html.text(str(self), "as text"))

    def __str__(self) -> str:
        from recoup.report.text import format_frontier

        return format_frontier(self.points)


@all_or_nothing
def frontier(
    model: nn.Module,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    step: StepFunction | None = None,
    inputs: Any = None,
    targets: Any = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    accumulate: int = 1,
    optimizer: OptimizerLike | None = None,
    device: str | torch.device | None = None,
    actions: Sequence[str] | None = None,
    cost: CostModel | None = None,
    num_points: int = 10,
) -> Frontier:
    """Returns the whole curve from the smallest reachable peak to the plain step.

    Args:
        model, batch, loss, step, inputs, targets, autocast, scaler, accumulate, optimizer: the training step, as for
            `plan`.
        device, actions, cost: as for `plan`.
        num_points: number of points, approximately; each is a simulated plan.

    Raises:
        UsageError, StepError, ConflictError: as `plan`.

    Example:
        >>> model, x = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]), torch.randn(4096, 64)
        >>> curve = recoup.frontier(model, x, device="a100-80gb", num_points=3)
        >>> curve.points[0].peak_bytes < curve.points[-1].peak_bytes
        True
    """
    check_count("num_points", num_points)
    objective, batch = make_objective(
        batch,
        loss=loss,
        step=step,
        inputs=inputs,
        targets=targets,
        autocast=autocast,
        scaler=scaler,
        accumulate=accumulate,
    )
    planner, name, entry = planner_for(
        model, batch, objective=objective, optimizer=optimizer, device=device, actions=actions, cost=cost
    )
    points = frontier_points(planner, num_points=num_points, device=name)
    return Frontier(planner, name, points, free_bytes_on(name, entry))


def explain(
    model: nn.Module,
    batch: Any = None,
    *,
    budget: int | str,
    loss: Loss | None = None,
    step: StepFunction | None = None,
    inputs: Any = None,
    targets: Any = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    accumulate: int = 1,
    optimizer: OptimizerLike | None = None,
    device: str | torch.device | None = None,
    actions: Sequence[str] | None = None,
    cost: CostModel | None = None,
) -> Explanation:
    """Returns what sets the peak of a budget's plan, what each kind of decision is worth (the plan against the same
    plan without it, both simulated), and what a little less and a little more memory would cost.

    Args:
        model, batch, loss, step, inputs, targets, autocast, scaler, accumulate, optimizer: the training step, as for
            `plan`.
        budget, device, actions, cost: as for `plan`.

    Raises:
        UsageError, StepError, ConflictError, InfeasibleBudget: as `plan`.

    Example:
        >>> model, x = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]), torch.randn(4096, 64)
        >>> print(recoup.explain(model, x, budget="99%", device="a100-80gb"))  # doctest: +ELLIPSIS
        Peak ...
    """
    check_budget(budget)
    objective, batch = make_objective(
        batch,
        loss=loss,
        step=step,
        inputs=inputs,
        targets=targets,
        autocast=autocast,
        scaler=scaler,
        accumulate=accumulate,
    )
    planner, name, entry = planner_for(
        model, batch, objective=objective, optimizer=optimizer, device=device, actions=actions, cost=cost
    )
    return Frontier(planner, name, (), free_bytes_on(name, entry)).explain(budget)
