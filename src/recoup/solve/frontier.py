"""Answers: the fastest choice for a budget, the leanest there is, and the whole curve between.

`Solver` lays a problem out once and answers many budgets. A choice is re-evaluated by `simulate.evaluate` before it is
returned; budgets are monotone by construction, since a larger limit only allows more moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from recoup.solve.dynamic import fastest
from recoup.solve.labels import Labels, smallest_limit
from recoup.solve.problem import Problem
from recoup.solve.sequence import Line, Pick
from recoup.solve.simulate import evaluate, uniform


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A choice and what it costs by the solver's own reckoning.

    Attributes:
        status: "optimal" for the fastest choice within the budget, "infeasible" if there is none; then `choice` is
            the leanest.
        peak_bytes: of the whole step, fixed bytes and optimizer step included.
    """

    status: Literal["optimal", "infeasible"]
    choice: tuple[Pick, ...]
    peak_bytes: int
    extra_seconds: float
    extra_flops: int


class Solver:
    """A problem, ready for questions."""

    def __init__(self, problem: Problem, *, actions: Sequence[str] = ("rederive", "recompute"), spans: bool = True) -> None:
        self.problem = problem
        self.line = Line(problem, regions="recompute" in actions, spans=spans)
        self.labels = Labels(self.line, actions=actions)
        self._moves = self.labels.moves(0, len(self.line.leaves))
        self._plain = uniform(self.line, 0, len(self.line.leaves), "save")
        self._leanest: Solution | None = None

    def solve(self, budget_bytes: int) -> Solution:
        """Returns the fastest choice whose peak is at most `budget_bytes`."""
        plain = self._solution(self._plain, "optimal")
        if plain.peak_bytes <= budget_bytes:
            return plain
        choice = None
        if self.problem.optimizer_peak_bytes <= budget_bytes:
            choice = fastest(
                self.line,
                self._moves,
                first=0,
                last=len(self.line.leaves),
                limit_bytes=budget_bytes - self.problem.fixed_bytes,
            )
        if choice is None:
            return dataclasses.replace(self.leanest(), status="infeasible")
        return self._solution(choice, "optimal")

    def leanest(self) -> Solution:
        """Returns the choice with the smallest peak (and, of those, the fastest)."""
        if self._leanest is None:
            length = len(self.line.leaves)
            high = evaluate(self.line, self._plain)[0]
            limit = smallest_limit(self.line, self._moves, 0, length, high)
            choice = fastest(self.line, self._moves, first=0, last=length, limit_bytes=limit)
            self._leanest = self._solution(choice or self._plain, "optimal")
        return self._leanest

    def frontier(self, num_points: int = 40) -> list[Solution]:
        """Returns up to `num_points` choices from the leanest to plain: more bytes, never slower."""
        plain = self._solution(self._plain, "optimal")
        low, high = self.leanest().peak_bytes, plain.peak_bytes
        found = [self.leanest()]
        for i in range(1, num_points - 1):
            found.append(self.solve(low + (high - low) * i // (num_points - 1)))
        found.append(plain)
        found.sort(key=lambda s: (s.peak_bytes, s.extra_seconds))
        curve: list[Solution] = []
        for solution in found:
            if not curve or solution.extra_seconds < curve[-1].extra_seconds:
                curve.append(solution)
        return curve

    def _solution(self, choice: tuple[Pick, ...], status: Literal["optimal", "infeasible"]) -> Solution:
        peak, seconds, flops = evaluate(self.line, choice)
        return Solution(
            status=status,
            choice=choice,
            peak_bytes=max(peak + self.problem.fixed_bytes, self.problem.optimizer_peak_bytes),
            extra_seconds=seconds,
            extra_flops=flops,
        )
