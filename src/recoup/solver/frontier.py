"""Answers: the fastest choice for a budget, the leanest there is, and the whole curve between.

`Solver` computes one front (`search`) that answers every budget, so budgets are monotone by construction: a larger one
may take all that a smaller one may. The baselines that people use by hand are among its candidates, so no answer is
slower than one of them. Every choice that is returned was priced by `reference.evaluate`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

from recoup._collector import without_collector
from recoup.solver.baselines import Pricer, Segments, choice_of, named_segments
from recoup.solver.pareto import Front, choice_at
from recoup.solver.problem import Problem
from recoup.solver.reference import evaluate_line, uniform
from recoup.solver.search import Search
from recoup.solver.sequence import Choice, Line

ACTIONS = ("rederive", "recompute")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A choice and what it costs by the solver's own reckoning.

    Attributes:
        status: "optimal" for the fastest choice found within the budget, "infeasible" if there is none; then `choice`
            is the leanest.
        choice: what each leaf and each region does, see `sequence.Pick`.
        peak_bytes: of the whole step, fixed bytes and optimizer step included.
        extra_seconds, extra_flops: over the plain step.
    """

    status: Literal["optimal", "infeasible"]
    choice: Choice
    peak_bytes: int
    extra_seconds: float
    extra_flops: int


class Solver:
    """Answers questions about one problem: for a budget, the leanest, the whole frontier.

    Args:
        problem: the step.
        actions: what may be chosen besides "save": "rederive", "recompute".
        spans: whether consecutive calls may form one region.
        nested_spans: whether calls inside a span may be regions and spans again, as in Rotor's recursion.

    Attributes:
        line: the problem, laid out.
        baselines: (extra seconds, peak bytes, regions) of each plan by hand.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        actions: Sequence[str] = ACTIONS,
        spans: bool = True,
        nested_spans: bool = True,
    ) -> None:
        self.problem = problem
        self.line = Line(problem)
        self._make_search = functools.partial(
            Search, self.line, actions=actions, spans=spans, nested_spans=nested_spans
        )
        self._plain = self._solution(uniform(self.line, 0, len(self.line.leaves), "save"))
        self.baselines: list[tuple[float, int, Segments]] = []
        if "recompute" in actions:
            pricer = Pricer(self.line)
            for _, segments in named_segments(self.line):
                if spans or all(len(segment) == 1 for segment in segments):
                    peak_bytes, extra_seconds = pricer.price(segments)
                    self.baselines.append((extra_seconds, peak_bytes, segments))
        self._leanest: Solution | None = None
        self._answers: dict[int, Solution] = {}

    @functools.cached_property
    def _front(self) -> Front:
        """The front of the whole step, computed when first needed (the baselines alone do not need it)."""
        with without_collector():
            return self._make_search().front()

    def solve(self, budget_bytes: int) -> Solution:
        """Returns the fastest choice whose peak is at most `budget_bytes`, or the leanest, with status "infeasible"."""
        if self._plain.peak_bytes <= budget_bytes:
            return self._plain
        fitting = [baseline for baseline in self.baselines if baseline[1] <= budget_bytes]
        best = min(fitting, key=lambda baseline: baseline[:2], default=None)
        room = budget_bytes - self.problem.fixed_bytes
        point = int(self._front.peaks.searchsorted(room, side="right")) - 1
        if self.problem.optimizer_peak_bytes > budget_bytes or (point < 0 and best is None):
            return dataclasses.replace(self.leanest(), status="infeasible")
        if point < 0 or (best is not None and best[0] < self._front.seconds[point] - 1e-9):
            assert best is not None
            return self._solution(choice_of(self.line, best[2]))
        return self._at(point)

    def leanest(self) -> Solution:
        """Returns the choice with the smallest peak (of those, the fastest)."""
        if self._leanest is None:
            floor = max(self._front_floor(), self.problem.optimizer_peak_bytes)
            self._leanest = self.solve(floor)
        return self._leanest

    def frontier(self, num_points: int = 40) -> list[Solution]:
        """Returns up to `num_points` choices from the leanest to plain: more bytes, strictly less time."""
        leanest, plain = self.leanest(), self._plain
        low, high = leanest.peak_bytes, plain.peak_bytes
        steps = max(num_points - 1, 1)
        found = [leanest, *(self.solve(low + (high - low) * i // steps) for i in range(1, steps)), plain]
        found.sort(key=lambda s: (s.peak_bytes, s.extra_seconds))
        curve: list[Solution] = []
        for solution in found:
            if not curve or solution.extra_seconds < curve[-1].extra_seconds:
                curve.append(solution)
        return curve

    def _front_floor(self) -> int:
        lowest = self.problem.fixed_bytes + int(self._front.peaks[0])
        return min([lowest, self._plain.peak_bytes, *(baseline[1] for baseline in self.baselines)])

    def _at(self, point: int) -> Solution:
        found = self._answers.get(point)
        if found is None:
            found = self._answers[point] = self._solution(choice_at(self._front, point))
        return found

    def _solution(self, choice: Choice) -> Solution:
        peak_bytes, extra_seconds, extra_flops = evaluate_line(self.line, choice)
        return Solution(
            status="optimal",
            choice=choice,
            peak_bytes=peak_bytes,
            extra_seconds=extra_seconds,
            extra_flops=extra_flops,
        )


def solve(problem: Problem, budget_bytes: int, *, actions: Sequence[str] = ACTIONS, spans: bool = True) -> Solution:
    """Returns the fastest choice whose peak is at most `budget_bytes`.

    Args:
        problem: the step.
        budget_bytes: peak of the whole step.
        actions: what may be chosen besides "save".
        spans: whether consecutive calls may form one region.

    Returns:
        The solution; with status "infeasible" and the leanest choice if nothing fits.
    """
    return Solver(problem, actions=actions, spans=spans).solve(budget_bytes)


def frontier(
    problem: Problem, num_points: int = 40, *, actions: Sequence[str] = ACTIONS, spans: bool = True
) -> list[Solution]:
    """Returns up to `num_points` solutions from the leanest to plain, none dominated: more bytes, less time."""
    return Solver(problem, actions=actions, spans=spans).frontier(num_points)
