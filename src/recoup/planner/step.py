"""The step that strategies plan for: its simulator, its scans and loop, its views."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence

from recoup.ir.decision import Decision, LossInPlace, Rebuild
from recoup.ir.trace import Trace
from recoup.planner.incumbents import EFFORTS, SEARCH_OPS, Allowance, Candidate, Effort, Incumbents
from recoup.planner.simulator import Simulator
from recoup.planner.strategies.scan_plans import ScanPlans
from recoup.planner.views import View, ViewMaker, ViewSet
from recoup.solver.loops import StepLoop
from recoup.thresholds import ESTIMATE_SHARE, SAME_SHARE


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStep:
    """A captured and priced step, and what may be done with it.

    Attributes:
        simulator: the step without a plan, and what decisions cost.
        actions: names of what may be used.
        scans: plans for its scans, if it has some that were given no schedule.
        loop: over time, if it has one.
        views: makes views of it for solvers.
        host_budget_bytes: the most that a plan may hold in the host's memory at a time; None: whatever it takes.
        effort: how much searches may simulate once a plan fits.
        shares: of its estimate that the leanest plan of a view took, by the view's name, as simulated last.
    """

    simulator: Simulator
    actions: tuple[str, ...]
    scans: ScanPlans | None
    loop: StepLoop | None
    views: ViewMaker
    host_budget_bytes: int | None = None
    effort: Effort = "normal"
    shares: dict[str, float] = dataclasses.field(default_factory=dict)

    def allowance(self, incumbents: Incumbents) -> Allowance:
        """Returns the allowance of a search that begins now: one answer at least."""
        return Allowance(num_ops=EFFORTS[self.effort] * SEARCH_OPS or 1, began_at=incumbents.num_simulated_ops)

    def is_content(self, incumbents: Incumbents, budget_bytes: int) -> bool:
        """Whether a plan fits and no effort is to be made for a better one beyond the solvers' answers."""
        return not EFFORTS[self.effort] and bool(incumbents.fitting(budget_bytes))

    def is_settled_by_tensor(self, incumbents: Incumbents, budget_bytes: int) -> bool:
        """Whether the fastest plan that fits is one by tensor whose seconds are its ops'.

        Regions choose among the same ops with fewer tensors to hold: they can only take less time beside them.
        """
        fastest = min(incumbents.fitting(budget_bytes), key=lambda c: c.step_seconds, default=None)
        return (
            fastest is not None
            and self.effort != "high"
            and any(isinstance(d, Rebuild) for d in fastest.decisions)
            and fastest.host_seconds <= SAME_SHARE * fastest.step_seconds
        )

    def views_for(self, budget_bytes: int, incumbents: Incumbents) -> ViewSet:
        """Returns the views for a budget: with losses in place, unless the fastest plan so far is without."""
        fitting = [c for c in incumbents.fitting(budget_bytes) if c.decisions]
        fastest = min(fitting, key=lambda c: c.step_seconds, default=None)
        is_plain = fastest is not None and not any(isinstance(d, LossInPlace) for d in fastest.decisions)
        return self.views.plain if is_plain else self.views.based

    def leanest_of(
        self, views: Sequence[View], incumbents: Incumbents
    ) -> Generator[tuple[Decision, ...], Candidate, list[tuple[View, Candidate]]]:
        """Yields the leanest plan of each view and returns the views with these, but for those not worth a simulation.

        These are views whose estimate is far above the smallest peak, if it is as far off as that of a view of this
        name or of these views was.
        """
        found: list[tuple[View, Candidate]] = []
        shares: list[float] = []
        for view in views:
            leanest = view.solver.leanest()
            estimated_bytes = leanest.peak_bytes + view.fixed_bytes
            share = min([self.shares.get(view.name, 1.0), *shares])
            if estimated_bytes * share > incumbents.least().peak_bytes * (1 + ESTIMATE_SHARE):
                continue
            candidate = yield view.decide(leanest.choice)
            self.shares[view.name] = candidate.peak_bytes / estimated_bytes
            shares.append(self.shares[view.name])
            found.append((view, candidate))
        return found

    @property
    def calls_trace(self) -> Trace:
        """The plain step's trace without calls inside of scans, which no decision can name."""
        return self.simulator.trace if self.scans is None else self.scans.trace
