"""Rebuild: which results are held, whatever module their ops lie in (`solver/segments.py`)."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from recoup.cost.host_overhead import step_seconds
from recoup.cost.model import PricedTrace
from recoup.ir.decision import Rebuild
from recoup.planner.held_view import HeldView, flop_seconds_of, held_view
from recoup.planner.incumbents import Candidate, Incumbents
from recoup.planner.rerun_prices import rerun_prices
from recoup.planner.step import PlannedStep
from recoup.planner.strategies.base import Decisions, Proposals, Strategy
from recoup.solver.excerpts import Hulls
from recoup.solver.segments import Choice, SegmentSolver
from recoup.thresholds import ESTIMATE_SHARE, MOST_TRIES, NEGLIGIBLE_SHARE, SAME_SHARE


class Way:
    """The step as it is, or with what every plan may have besides.

    Attributes:
        base: what every plan may have besides. without: the step with nothing rebuilt. seconds: what it takes under a
            plan by tensor, which spares some of what its other decisions take by themselves.
        view: what may be held in it. is_fine: whether segments may end at each step of a loop that collects results.
    """

    def __init__(
        self,
        base: Decisions,
        without: Candidate,
        seconds: float,
        view: HeldView,
        hulls: Hulls,
        *,
        is_fine: bool = False,
    ) -> None:
        self.base = base
        self.is_fine = is_fine
        self.without = without
        self.seconds = seconds
        self.view = view
        self._hulls = hulls

    @functools.cached_property
    def solver(self) -> SegmentSolver:
        """The solver of its problem, made when it is first asked for."""
        return SegmentSolver(self.view.problem, in_pieces=True, hulls=self._hulls)

    def decide(self, choice: Choice) -> Decisions:
        """Returns a choice as decisions."""
        return (*self.base, self.view.decide(choice))


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
    def ways(self) -> tuple[Way, ...]:
        """The step as it is, and with its losses in place; none where the trace does not tell the model's ops.

        Only the latter, if it takes no longer. Each with few places for segments to end, then with those in loops, if
        they are others.
        """
        simulator = self._step.simulator
        steps: list[tuple[Decisions, PricedTrace]] = [((), simulator.priced)]

        def seconds(decisions: Decisions, step: PricedTrace) -> float:
            alone, beside = (
                step_seconds(chosen, step, plain=simulator.trace)
                for chosen in (decisions, (*decisions, Rebuild(path="")))
            )
            return simulator.simulate(decisions).step_seconds + beside - alone

        if simulator.base[0]:
            is_free = seconds(*simulator.base) <= simulator.plain.step_seconds * (1 + NEGLIGIBLE_SHARE)
            steps = [*(() if is_free else steps), simulator.base]
        found = []
        hulls = Hulls()  # of equal segments of either step, whose ops therefore cost the same
        options: Any = {"kept_paths": simulator.spec.keep, "flop_seconds": flop_seconds_of(simulator.priced)}
        for decisions, step in steps:
            prices = rerun_prices(step.trace, simulator.cost)
            coarse, fine = (
                held_view(step, in_loops=in_loops, **prices._asdict(), **options) for in_loops in (False, True)
            )
            if coarse is None or fine is None:
                continue
            parts = decisions, simulator.simulate(decisions), seconds(decisions, step)
            found.append(Way(*parts, coarse, hulls))
            if fine.problem.places != coarse.problem.places:
                found.append(Way(*parts, fine, hulls, is_fine=True))
        return tuple(found)

    def why_not_tried(self) -> dict[str, str]:
        """Says so where the trace does not tell the model's ops from others."""
        return {} if self.ways else {"rebuild": "the model's forward runs no ops of its own"}

    def propose(self, budget_bytes: int, incumbents: Incumbents) -> Proposals:
        """Yields the solver's answers for the budget, each repaired by the gap of the one before."""
        allowance = self._step.allowance(incumbents)
        if not self.ways:
            return
        flop_seconds = self.ways[0].view.flop_seconds

        def cost(candidate: Candidate) -> float:
            return candidate.step_seconds + flop_seconds * candidate.product_flops

        # A plan's blocks on a card are about as full as those of the step with nothing rebuilt.
        target, has_fitted, ways = budget_bytes - self.ways[-1].without.card_excess_bytes, False, self.ways
        fitted_seconds = math.inf
        spared_seconds = NEGLIGIBLE_SHARE * self._step.simulator.plain.step_seconds
        for _ in range(MOST_TRIES):
            if allowance.ends(incumbents, budget_bytes):
                return
            choices = self._choices(target - self._fixed_bytes, ways)
            best = min((cost(c) for c in incumbents.fitting(budget_bytes)), default=math.inf)
            worth = best * (1 - NEGLIGIBLE_SHARE)
            hopeful = [
                (way.seconds + flop_seconds * way.without.product_flops + choice.extra_seconds, n)
                for n, (way, choice) in enumerate(choices)
                if choice is not None
            ]
            if not hopeful or min(hopeful)[0] >= best * (
                1 + SAME_SHARE
            ):  # simulations differ from it by up to half that
                return
            estimate, n = min(hopeful)
            way, choice = choices[n]
            assert choice is not None
            if estimate > fitted_seconds - spared_seconds:
                return
            if way.is_fine:
                ways = tuple(w for w in self.ways if w.is_fine)  # coarser ones have hardly a place that these lack
            candidate = yield way.decide(choice)
            gap = candidate.peak_bytes - budget_bytes
            if gap == 0 or (gap > 0 and cost(candidate) >= worth):
                return  # what needs less would be slower still
            if gap > 0:
                target = min(target, choice.peak_bytes + self._fixed_bytes) - gap
            elif has_fitted or gap >= -NEGLIGIBLE_SHARE * budget_bytes:
                return
            else:
                has_fitted, fitted_seconds, target = True, estimate, target - gap

    def _choices(self, room_bytes: int, ways: Sequence[Way]) -> list[tuple[Way, Choice | None]]:
        """Returns the solvers' answers; those with finer places are asked where without them much runs again."""
        found = [(way, way.solver.solve(room_bytes)) for way in ways if not way.is_fine]
        least = min((choice.extra_seconds for _, choice in found if choice is not None), default=math.inf)
        if least > ESTIMATE_SHARE * self._step.simulator.plain.step_seconds:
            found += [(way, way.solver.solve(room_bytes)) for way in ways if way.is_fine]
        return found

    def shrink(self, incumbents: Incumbents) -> Proposals:
        """Yields the leanest choice, and where it was estimated too low those between its estimate and its peak."""
        if not self.ways:
            return
        way, *finer = [way for way in self.ways if way.base == self.ways[-1].base]  # with the loss in place, if it is
        choice = way.solver.leanest()
        for fine in finer:
            leaner = sys.maxsize if choice is None else int(choice.peak_bytes * (1 - NEGLIGIBLE_SHARE))
            if fine.solver.solve(leaner) is not None:
                way, choice = fine, fine.solver.leanest()
        low = 0 if choice is None else choice.peak_bytes
        middle, least = low, sys.maxsize
        for _ in range(MOST_TRIES):
            if choice is None:
                return
            candidate = yield way.decide(choice)
            peak_bytes = candidate.peak_bytes - self._fixed_bytes
            low, least = (low, peak_bytes) if peak_bytes < least else (middle, least)
            if least - low <= NEGLIGIBLE_SHARE * least:
                return
            middle = (low + least) // 2
            choice = way.solver.solve(middle)
