"""From a model and a budget to a plan: the step is captured and priced, strategies propose, simulation selects.

Where a budget becomes a plan: `plan_for_budget` here -> `budget_search.BudgetSearch.fit`, the one loop -> a strategy's
`propose` (`strategies/`) -> `solver.frontier.Solver.solve` -> back in the loop, `simulator.Simulator.simulate`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from recoup._collector import few_full_collections
from recoup.capture.spec import StepSpec
from recoup.cost.card_memory import CardSize
from recoup.cost.host_link import Link
from recoup.cost.model import CostModel
from recoup.errors import InfeasibleBudget, UsageError
from recoup.ir.decision import Decision
from recoup.ir.plan import Plan
from recoup.ir.text import format_share
from recoup.planner.budget_search import BudgetSearch
from recoup.planner.incumbents import Candidate, Effort
from recoup.planner.prediction import write_plan
from recoup.planner.remembered import recall, step_key
from recoup.planner.simulator import Simulator
from recoup.planner.step import PlannedStep
from recoup.planner.strategies.base import Strategy
from recoup.planner.strategies.link import find_link
from recoup.planner.strategies.registry import DEFAULT_ACTIONS, STRATEGIES
from recoup.planner.strategies.scan_plans import ScanPlans
from recoup.planner.views import View, ViewMaker
from recoup.runtime import scan_bytes
from recoup.runtime.hooks import HOOKS, Hook
from recoup.runtime.offload.optimizer_state import find_offload
from recoup.solver.loops import find_loop
from recoup.thresholds import MOST_TRIES
from recoup.units import format_at_least, format_bytes, is_minimum, parse_budget

_S = TypeVar("_S", bound=Strategy)


class Planner(Simulator):
    """Plans for one step on one device.

    Attributes:
        actions: what plans may use besides save.
        prefers_equal_bits: no actions were asked for: something rounds differently only where nothing else fits.
        scans: plans for its scans, if it has some that were given no schedule.

    Args:
        actions: names; None: the default ones, equal bits preferred, and offload if the host has a budget.
        host_budget_bytes: the most that a plan may hold in the host's memory at a time; None: whatever it takes.
        spans: whether consecutive calls may form one region.
        strategies: what proposes plans.
        hooks: how decisions of each class change a call.
        remembers: a search that was made in this process before is not made again.
        effort: how much searches may simulate once a plan fits.
        card_free_bytes: what torch may reserve on the card; None: not known, or no card.
        expandable: whether the allocator there is set to expandable segments.
    """

    def __init__(
        self,
        spec: StepSpec,
        *,
        cost: CostModel,
        actions: Sequence[str] | None,
        host_budget_bytes: int | None = None,
        fixed_bytes: int = 0,
        spans: bool = True,
        strategies: Sequence[type[Strategy]] = STRATEGIES,
        hooks: Mapping[type[Decision], Hook] = HOOKS,
        remembers: bool = False,
        effort: Effort = "normal",
        card_free_bytes: int | None = None,
        expandable: bool = False,
    ) -> None:
        self._remembers = remembers
        self.card_free_bytes = card_free_bytes
        self.expandable = expandable
        self.prefers_equal_bits = actions is None
        by_default = DEFAULT_ACTIONS if host_budget_bytes is None else (*DEFAULT_ACTIONS, "offload")
        self.actions = by_default if actions is None else tuple(actions)
        self.host_budget_bytes = host_budget_bytes
        link: Link | None = None
        if "offload" in self.actions or find_offload(spec.optimizer) is not None:
            device = next((p.device for p in spec.model.parameters() if p.device.type != "meta"), torch.device("cpu"))
            link = find_link(cost, device=device, dialect=spec.dialect)
        num_scans = scan_bytes.num_free()
        super().__init__(spec, cost=cost, fixed_bytes=fixed_bytes, link=link, hooks=hooks)
        state_bytes = self.trace.optimizer_host_bytes
        if host_budget_bytes is not None and state_bytes > host_budget_bytes:
            raise UsageError(
                f"host_budget={format_bytes(host_budget_bytes)}: the optimizer's state alone takes "
                f"{format_bytes(state_bytes)} on the host (offload_optimizer). Give it that much, or remove() what "
                "offload_optimizer returned."
            )
        self.scans: ScanPlans | None = None
        if "recompute" in self.actions and scan_bytes.num_free() > num_scans:
            found = ScanPlans(self, rederives="rederive" in self.actions)
            self.scans = found if found.ladders else None
        self.takes_loss_in_place = "loss-in-place" in self.actions and self.scans is None
        trace = self.trace if self.scans is None else self.scans.trace
        self.step = PlannedStep(
            simulator=self,
            actions=self.actions,
            scans=self.scans,
            loop=find_loop(trace) if "recompute" in self.actions else None,
            views=ViewMaker(self, actions=self.actions, spans=spans, scans=self.scans),
            host_budget_bytes=host_budget_bytes,
            effort=effort,
        )
        made = (kind.make(self.step) for kind in strategies)
        asked = [strategy for strategy in made if strategy is not None]
        self.strategies = tuple(sorted(asked, key=lambda s: not s.dominates_step))  # no other is asked after such a one
        self._search = BudgetSearch(
            self, self.strategies, prefers_equal_bits=self.prefers_equal_bits, host_budget_bytes=host_budget_bytes
        )

    def fit(self, budget_bytes: int) -> Candidate | None:
        """Returns the fastest plan found whose simulated peak is at most the budget, None if there is none."""
        with self._searching():
            return self._recalled(budget_bytes, lambda: self._search.fit(budget_bytes))

    def smallest(self) -> Candidate:
        """Returns the plan with the smallest simulated peak that was found."""
        with self._searching():
            found = self._recalled(None, self._search.smallest)
            assert found is not None
            return found

    @contextlib.contextmanager
    def _searching(self) -> Iterator[None]:
        """Between the captures and prices inside, no other code runs."""
        try:
            with self.spec.known_state.kept():
                yield
        finally:
            self.cost.rest()

    def _recalled(self, budget_bytes: int | None, search: Callable[[], Candidate | None]) -> Candidate | None:
        """Returns a search's answer for a budget (None: the smallest peak), or that of an identical earlier search.

        Plans for scans rest on more than the trace, and a search that is not this planner's first on those before it.
        """
        if not self._remembers or self.scans is not None or self.num_simulated_ops:
            return search()
        return recall(f"{self._step_key} {budget_bytes}", self.simulate, search)

    @functools.cached_property
    def _step_key(self) -> str:
        spec = self.spec
        asked = (self.actions, self.prefers_equal_bits, sorted(spec.keep), self.host_budget_bytes, self.step.effort)
        device = (spec.dialect, spec.capability, spec.round_bytes, self.fixed_bytes, self.link)
        return step_key(self.priced, asked, device)

    @property
    def saving_view(self) -> View:
        """The view in which tensors outside of regions are saved: plans by hand are written over it."""
        return self.step.views.plain.saving

    def strategy(self, kind: type[_S]) -> _S | None:
        """Returns the planner's strategy of a kind, None if the step has nothing for it."""
        return next((s for s in self.strategies if isinstance(s, kind)), None)

    def why_not_tried(self) -> dict[str, str]:
        """Returns for each action that was asked for by name and not tried why."""
        if self.prefers_equal_bits:
            return {}
        reasons: dict[str, str] = {}
        for strategy in self.strategies:
            reasons.update(strategy.why_not_tried())
        ruling = next((s for s in self.strategies if s.dominates_step), None)
        for action in self.actions:
            if ruling is not None and action not in ruling.actions and action != "rederive":
                reasons[action] = "a loop over time is most of the step, and only plans for its calls are searched"
            elif action in ("tile", "tile-modules") and self.trace.source != "fake":
                reasons[action] = f"the step was captured from a real run ({self.trace.reason})"
        return reasons

    def _left_out(self) -> tuple[str, ...]:
        return tuple(f"a plan with {actions} was left out: {why}" for actions, why in self.failures.items())

    def infeasible(self, budget_bytes: int) -> InfeasibleBudget:
        """Returns the error that says what the smallest reachable peak is, and what sets it."""
        smallest = self.smallest()
        largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in smallest.tensors[:3])
        share = format_share(smallest.peak_bytes, self.plain.peak_bytes)
        host = self.host_budget_bytes
        within = f" with at most {format_bytes(host)} on the host" if host is not None else ""
        others = "" if self.prefers_equal_bits else ", more actions"
        within += "" if self.prefers_equal_bits else f" with {', '.join(self.actions) or 'no actions'} alone"
        libraries = f" Libraries (cuBLAS) take {format_bytes(self.fixed_bytes)} of it." if self.fixed_bytes else ""
        left_out = "".join(f" {text[0].upper()}{text[1:]}" for text in self._left_out())
        return InfeasibleBudget(
            f"Budget {format_bytes(budget_bytes)} is below the smallest reachable peak "
            f"{format_bytes(smallest.peak_bytes)} ({share} of plain){within}, which is in the {smallest.phase} "
            f"(largest there: {largest}).{libraries} Use a budget of at least {format_at_least(smallest.peak_bytes)} "
            f"(or 'min'){others}, a smaller batch, or a leaner optimizer or dtype.{left_out}",
            budget_bytes=budget_bytes,
            minimum_bytes=smallest.peak_bytes,
            phase=smallest.phase,
            tensors=smallest.tensors,
        )

    def plan(
        self,
        candidate: Candidate,
        *,
        budget_bytes: int,
        budget_text: str,
        device: str,
        card: CardSize | None = None,
    ) -> Plan:
        """Returns the plan for people and for disk; `card` as `card_size` says."""
        notes: tuple[str, ...] = ()
        if budget_text.strip().endswith("%") and self.fixed_bytes:
            rest = format_bytes(self.plain.peak_bytes - self.fixed_bytes)
            notes += (
                f"{budget_text} is of the {rest} of the plain peak that libraries leave; they take "
                f"{format_bytes(self.fixed_bytes)} whatever the plan (cuBLAS)",
            )
        notes += self._left_out()
        if candidate.decisions:
            notes += tuple(f"{action} was not tried: {why}" for action, why in self.why_not_tried().items())
        return write_plan(
            self,
            candidate,
            budget_bytes=budget_bytes,
            budget_text=budget_text,
            device=device,
            card=card,
            expandable=self.expandable,
            more_notes=notes,
        )


@few_full_collections()
def plan_for_budget(
    planner: Planner, *, budget: int | str, free_bytes: int | None, device: str
) -> tuple[Plan, Candidate]:
    """Returns the fastest plan for the budget.

    On a card torch reserves more than a plan's tensors take. `budget="auto"` is what it may reserve; of another budget
    that the card has, a plan that would need more than the card with its fragments gives way to one that does not, if
    there is one.

    Raises:
        InfeasibleBudget: if the smallest reachable peak is above it.
    """
    budget_bytes = parse_budget(
        budget,
        plain_peak_bytes=planner.plain.peak_bytes,
        free_bytes=free_bytes,
        library_bytes=planner.fixed_bytes,
        minimum_bytes=planner.smallest().peak_bytes if is_minimum(budget) else None,
    )
    candidate = planner.fit(budget_bytes)
    if candidate is None:
        raise planner.infeasible(budget_bytes)
    card = None if planner.card is None else planner.card_size(candidate.decisions)
    fastest, limit_bytes = (candidate, card), 0
    if card is not None:
        limit_bytes = budget_bytes if budget == "auto" else planner.card_free_bytes or 0
        if limit_bytes < budget_bytes:
            limit_bytes = card.worst_bytes(expandable=planner.expandable)  # the plan is for another card than this one
        for _ in range(MOST_TRIES):
            over = card.worst_bytes(expandable=planner.expandable) - limit_bytes
            if over <= 0:
                break
            smaller = planner.fit(candidate.peak_bytes - over)
            if smaller is None and budget == "auto":
                raise planner.infeasible(candidate.peak_bytes - over)
            if smaller is None:
                candidate, card = fastest[0], fastest[1] or card
                break
            candidate, card = smaller, planner.card_size(smaller.decisions)
    made = planner.plan(candidate, budget_bytes=budget_bytes, budget_text=str(budget), device=device, card=card)
    if candidate is not fastest[0] and fastest[1] is not None:
        needed = fastest[1].worst_bytes(expandable=planner.expandable)
        note = (
            f"a faster plan that peaks at {format_bytes(fastest[0].peak_bytes)} would have torch reserve "
            f"{format_bytes(needed)} of the card, which has {format_bytes(limit_bytes)} to give"
        )
        made = dataclasses.replace(made, notes=(*made.notes, note))
    return made, candidate


def is_on_meta(model: nn.Module) -> bool:
    """Whether any parameter is on the `meta` device."""
    return any(p.device.type == "meta" for p in model.parameters())
