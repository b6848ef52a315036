"""Rebuild: which results are held, whatever module their ops lie in (`solver/segments.py`)."""

from __future__ import annotations

import functools
import math
import sys
from typing import ClassVar, Self

from recoup.planner.held_view import HeldView, held_view
from recoup.planner.incumbents import Candidate, Incumbents
from recoup.planner.rerun_prices import rerun_seconds
from recoup.planner.step import PlannedStep
from recoup.planner.strategies.base import Proposals, Strategy
from recoup.solver.segments import SegmentSolver
from recoup.thresholds import MOST_TRIES, NEGLIGIBLE_SHARE


class RebuildStrategy(Strategy):
    """Asks for the fastest segments within the budget, and repairs by what the simulation says.

    A rival of regions: it is asked only for what costs less, by its own reckoning, than what fits already: seconds,
    and FLOPs by `HeldView.flop_seconds`.
    """

    actions: ClassVar[tuple[str, ...]] = ("rebuild",)

    def __init__(self, step: PlannedStep) -> None:
        self._step = step
        self._fixed_bytes = step.simulator.fixed_bytes

    @classmethod
    def make(cls, step: PlannedStep) -> Self | None:
        """Returns the strategy where ops may run again; steps of scans have plans of their own."""
        was_asked_for = "rebuild" in step.actions
        if step.scans is not None or not (was_asked_for or {"rederive", "recompute"} <= set(step.actions)):
            return None
        return cls(step)

    @functools.cached_property
    def _view(self) -> HeldView | None:
        simulator, priced = self._step.simulator, self._step.simulator.base[1]
        again = rerun_seconds(priced.trace, simulator.cost)
        return held_view(priced, kept_paths=simulator.spec.keep, rerun_seconds=again)

    @functools.cached_property
    def _solver(self) -> SegmentSolver | None:
        return None if self._view is None else SegmentSolver(self._view.problem, in_pieces=True)

    def why_not_tried(self) -> dict[str, str]:
        """Says so where the trace does not tell the model's ops from others."""
        return {} if self._view is not None else {"rebuild": "the model's forward runs no ops of its own"}

    def propose(self, budget_bytes: int, incumbents: Incumbents) -> Proposals:
        """Yields the solver's answers for the budget, each repaired by the gap of the one before."""
        allowance = self._step.allowance(incumbents)
        if self._view is None or self._solver is None:
            return
        flop_seconds = self._view.flop_seconds

        def cost(candidate: Candidate) -> float:
            return candidate.step_seconds + flop_seconds * candidate.product_flops

        base, _ = self._step.simulator.base
        plain = cost(self._step.simulator.simulate(base))
        target, has_fitted = budget_bytes, False
        for _ in range(MOST_TRIES):
            if allowance.ends(incumbents, budget_bytes):
                return
            choice = self._solver.solve(target - self._fixed_bytes)
            best = min((cost(c) for c in incumbents.fitting(budget_bytes)), default=math.inf)
            worth = best * (1 - NEGLIGIBLE_SHARE)
            if choice is None or plain + choice.extra_seconds >= worth:
                return
            candidate = yield (*base, self._view.decide(choice))
            gap = candidate.peak_bytes - budget_bytes
            if gap == 0 or (gap > 0 and cost(candidate) >= worth):
                return  # what needs less would be slower still
            if gap > 0:
                target = min(target, choice.peak_bytes + self._fixed_bytes) - gap
            elif has_fitted or gap >= -NEGLIGIBLE_SHARE * budget_bytes:
                return
            else:
                has_fitted, target = True, target - gap

    def shrink(self, incumbents: Incumbents) -> Proposals:
        """Yields the leanest choice, and where it was estimated too low those between its estimate and its peak."""
        if self._view is None or self._solver is None:
            return
        choice = self._solver.leanest()
        low = 0 if choice is None else choice.peak_bytes
        middle, least = low, sys.maxsize
        for _ in range(MOST_TRIES):
            if choice is None:
                return
            candidate = yield (*self._step.simulator.base[0], self._view.decide(choice))
            peak_bytes = candidate.peak_bytes - self._fixed_bytes
            low, least = (low, peak_bytes) if peak_bytes < least else (middle, least)
            if least - low <= NEGLIGIBLE_SHARE * least:
                return
            middle = (low + least) // 2
            choice = self._solver.solve(middle)
