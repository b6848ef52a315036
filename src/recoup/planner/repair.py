"""Repairs of a solver's answer: its model of memory adds up, reality has aliases.

So a view is asked for a target, its answer is simulated, and the target is moved by the gap between the simulated peak
and the budget: down where the plan is over, and a little more, up where it leaves much unused.
"""

from __future__ import annotations

from recoup.planner.incumbents import CLOSE_SHARE, MOST_REPAIRS, WORTH_SHARE, Allowance, Incumbents
from recoup.planner.strategies.base import Proposals
from recoup.planner.views import View

BEYOND_SHARE = 0.002  # of the budget: by how much more than the gap a target is lowered, since the next may miss too


def repaired(
    view: View, budget_bytes: int, incumbents: Incumbents, allowance: Allowance, *, num_repairs: int = MOST_REPAIRS
) -> Proposals:
    """Yields a view's answers for a budget, each repaired by what the simulation of the one before said."""
    target, beyond_bytes = budget_bytes, 0
    has_fitted = False
    for _ in range(num_repairs):
        # What rounds differently is no reason to stop looking for a plan that does not.
        best = incumbents.seconds(budget_bytes, exact=not view.tiles)
        worth = best * (1 - WORTH_SHARE)
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
            beyond_bytes = min(gap, int(budget_bytes * BEYOND_SHARE))
        elif candidate.peak_bytes >= CLOSE_SHARE * budget_bytes:
            return
        else:
            has_fitted = True
            target, beyond_bytes = target - beyond_bytes - gap, 0
