"""Repairs of a solver's answer: its model of memory adds up, reality has aliases.

So a view is asked for a target, its answer is simulated, and the target is moved by the gap between the simulated peak
and the budget: down where the plan is over, and a little more, up where it leaves much unused.
"""

from __future__ import annotations

from recoup.planner.incumbents import Allowance, Incumbents
from recoup.planner.strategies.base import Proposals
from recoup.planner.views import View
from recoup.thresholds import MOST_TRIES, NEGLIGIBLE_SHARE, SAME_SHARE


def repaired(
    view: View, budget_bytes: int, incumbents: Incumbents, allowance: Allowance, *, num_repairs: int = MOST_TRIES
) -> Proposals:
    """Yields a view's answers for a budget, each with its target moved by the simulated error of the one before."""
    target, beyond_bytes = budget_bytes, 0
    has_fitted = False
    for _ in range(num_repairs):
        # What rounds differently is no reason to stop looking for a plan that does not.
        best = incumbents.seconds(budget_bytes, exact=not view.tiles)
        worth = best * (1 - NEGLIGIBLE_SHARE)
        if best < float("inf") and (allowance.is_spent(incumbents) or view.least_seconds(budget_bytes) >= worth):
            return
        solution = view.solver.solve(target - beyond_bytes - view.fixed_bytes)
        if solution.status == "infeasible" and beyond_bytes:
            solution = view.solver.solve(target - view.fixed_bytes)
        if solution.status == "infeasible" or view.plain_seconds + solution.extra_seconds >= worth:
            return  # even by its own reckoning hardly faster than what fits already
        candidate = yield view.decide(solution.choice)
        gap = candidate.peak_bytes - budget_bytes
        if has_fitted or (gap > 0 and candidate.step_seconds >= worth):
            return  # what needs less would be slower still
        if gap > 0:
            # From the solver's own reckoning on, if that is less: otherwise the same answer comes again.
            target = min(target, solution.peak_bytes + view.fixed_bytes) - gap
            beyond_bytes = min(gap, int(budget_bytes * NEGLIGIBLE_SHARE))
        elif gap >= -SAME_SHARE * budget_bytes:
            return
        else:
            has_fitted = True
            target, beyond_bytes = target - beyond_bytes - gap, 0
