"""Values that the model's own code has alive in forward after the interval that made them: in variables, in lists.

They are there in forward whoever holds them: a plan that holds one for backward has it once. So a search over segments
keeps in each state whether they are held, as bits of a number. A bit is used again once its value is gone.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping

import numpy as np

from recoup.solver.held_problem import HeldProblem


class AliveInCode:
    """The values of one problem that autograd saves and code has alive longer.

    Attributes:
        bits: of each value, 0 for one that found none.

    Args:
        problem: of a forward.
        first_saved: op that saves a value first, by value.
        maker: op that makes a value, by value.
    """

    def __init__(self, problem: HeldProblem, first_saved: Mapping[int, int], maker: Mapping[int, int]) -> None:
        self._places = problem.places
        self._released = problem.released
        self.bits: dict[int, int] = {}
        free_from = [-1] * (np.iinfo(np.int64).bits - 1)  # the last interval in which a bit's value is alive
        self._at: list[list[int]] = [[] for _ in problem.places]
        self._made = [0] * len(problem.places)
        for value in sorted(first_saved, key=lambda v: maker[v]):
            if not problem.bare_bytes:
                break
            begin, end = self._interval(maker[value]), self._interval(self._released[value])
            if end <= begin or first_saved[value] >= self._released[value]:
                continue
            for i in range(begin + 1, end + 1):
                if self._released[value] >= problem.places[i] > first_saved[value]:
                    self._at[i].append(value)
            outlives = self._released[value] >= len(problem.ops)  # there in backward, too: beside what is held
            bit = None if outlives else next((b for b, last in enumerate(free_from) if last < begin), None)
            if bit is not None:
                free_from[bit] = end
            self.bits[value] = 0 if bit is None else 1 << bit
            self._made[begin] |= self.bits[value]

    def at(self, i: int) -> list[int]:
        """Returns the values that autograd has saved before interval `i` and that code has alive as it begins."""
        return self._at[i]

    def mask(self, values: Iterable[int], j: int | None = None) -> int:
        """Returns the bits of those of the values that have one; with `j`, of those alive as interval `j` begins."""
        found, begin = 0, -1 if j is None or j == len(self._places) else self._places[j]
        for value in values:
            bit = self.bits.get(value, 0)
            if bit and self._released[value] >= begin:
                found |= bit
        return found

    def shared_at(self, i: int, values: Iterable[int]) -> dict[int, int]:
        """Returns the bits of those of the values that autograd has saved before interval `i` and code has alive."""
        there = set(self._at[i])
        return {v: bit for v in values if v in there and (bit := self.bits[v])}

    def made_in(self, i: int, j: int) -> int:
        """Returns the bits of the values that intervals [i, j) make."""
        found = 0
        for bits in self._made[i:j]:
            found |= bits
        return found

    def _interval(self, op: int) -> int:
        return bisect.bisect_right(self._places, op) - 1
