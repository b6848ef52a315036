"""Recompute: which calls and spans run again, and what is saved or rederived around and inside them: one search."""

from __future__ import annotations

from typing import ClassVar, Self

from recoup.planner.incumbents import Incumbents
from recoup.planner.repair import repaired
from recoup.planner.simulator import EVERYWHERE
from recoup.planner.step import PlannedStep
from recoup.planner.strategies.base import Decisions, Proposals, Strategy
from recoup.thresholds import ESTIMATE_SHARE, MOST_TRIES, NEGLIGIBLE_SHARE


class RecomputeStrategy(Strategy):
    """Asks the solver for choices over calls and spans, and repairs them."""

    actions: ClassVar[tuple[str, ...]] = ("rederive", "recompute")

    def __init__(self, step: PlannedStep) -> None:
        self._step = step

    @classmethod
    def make(cls, step: PlannedStep) -> Self:
        """Returns the strategy; without its actions its views hold the plain step and scans only."""
        return cls(step)

    def propose(self, budget_bytes: int, incumbents: Incumbents) -> Proposals:
        """Yields the answers of each view; everything rederived first, the cheapest plan that frees much."""
        if self._step.is_settled_by_tensor(incumbents, budget_bytes):
            return
        found = self._step.views_for(budget_bytes, incumbents)
        if "rederive" in self._step.actions and self._step.scans is None:
            yield (*EVERYWHERE, *found.tiles)
        allowance = self._step.allowance(incumbents)
        # Bytes of scans are moved to the budget afterwards, which repairs more than a solver can.
        num_repairs = MOST_TRIES if self._step.scans is None else 1
        for view in found.views:
            yield from repaired(view, budget_bytes, incumbents, allowance, num_repairs=num_repairs)

    def shrink(self, incumbents: Incumbents) -> Proposals:
        """Yields the leanest plan of each view, then what its solver takes for little more: estimates may be off.

        It goes on for as long as the smallest would be one that is as much smaller than estimated as any was so far,
        and as much again.
        """
        allowance = self._step.allowance(incumbents)
        found = yield from self._step.leanest_of(self._step.views.based.views, incumbents)
        tried: set[Decisions] = {candidate.decisions for _, candidate in found}
        least_share = min([1.0, *(self._step.shares[view.name] for view, _ in found)])
        far_bytes = incumbents.least().peak_bytes * (1 + ESTIMATE_SHARE)
        for view in [view for view, candidate in found if candidate.peak_bytes <= far_bytes]:
            estimated_bytes, num_larger = view.solver.leanest().peak_bytes, 0
            for step in range(1, round(ESTIMATE_SHARE / NEGLIGIBLE_SHARE) + 1):
                solution = view.solver.solve(int(estimated_bytes * (1 + step * NEGLIGIBLE_SHARE)))
                least_bytes = incumbents.least().peak_bytes
                expected_bytes = (solution.peak_bytes + view.fixed_bytes) * (2 * least_share - 1)
                is_hopeless = expected_bytes > least_bytes * (1 + NEGLIGIBLE_SHARE)
                if is_hopeless or num_larger >= MOST_TRIES or allowance.is_spent(incumbents):
                    break
                decisions = view.decide(solution.choice)
                if decisions in tried:
                    continue
                tried.add(decisions)
                candidate = yield decisions
                least_share = min(least_share, candidate.peak_bytes / (solution.peak_bytes + view.fixed_bytes))
                num_larger = 0 if candidate.peak_bytes < least_bytes else num_larger + 1
