"""Segments cut out of a forward, for minimum cuts: equal ones have one hull, which is found once.

A segment is what its ops do to each other: what they read of earlier ones is there anyway. So equal layers are equal
segments, whatever lies before them, and so are those of one forward under other losses.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from recoup.solver.held import Held, Op, Segment, hull
from recoup.solver.held_problem import HeldProblem
from recoup.thresholds import MOST_TRIES

Corners = list[tuple[Held, int]]
"""Of a hull, each with the bytes of `rebuild_bytes`. Values are numbered in the order they are made, from 0."""


class Hulls:
    """Corners of the hulls of segments, by what their ops are and which values backward reads."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._corners: dict[Any, Corners] = {}

    def number(self, described: Any) -> int:
        """Returns a number that stands for a description."""
        return self._numbers.setdefault(described, len(self._numbers))

    def corners(self, key: Any) -> Corners | None:
        """Returns those of a segment, None if they are not known."""
        return self._corners.get(key)

    def note(self, key: Any, corners: Corners) -> None:
        """Keeps those of a segment."""
        self._corners[key] = corners


class Excerpts:
    """Finds the hulls of one problem's segments.

    Args:
        problem: of a forward.
        maker: op that makes a value, by value.
        hulls: those known of this and other problems; new ones are added.
    """

    def __init__(self, problem: HeldProblem, maker: Mapping[int, int], hulls: Hulls) -> None:
        self._problem, self._hulls = problem, hulls
        self._made = [v for op in problem.ops for v in op.outputs]
        self._place = {v: at for at, v in enumerate(self._made)}
        self._starts = [0, *itertools.accumulate(len(op.outputs) for op in problem.ops)]
        # What each op reads that others made, the latest first, so that a segment has the first ones of it.
        self._reads = [sorted((self._place[v] for v in op.inputs if v in maker), reverse=True) for op in problem.ops]
        self._numbers: list[dict[int, int]] = [{} for _ in problem.ops]  # by how many of those a segment has

    def made(self, first: int, last: int) -> list[int]:
        """Returns the values that ops [first, last) make."""
        return self._made[self._starts[first] : self._starts[last]]

    def corners(self, first: int, last: int, saved: Collection[int]) -> Corners:
        """Returns the corners of the hull of ops [first, last), of whose values backward reads the `saved` ones."""
        begin, end = self._starts[first], self._starts[last]
        reads = tuple(at - begin for at in sorted(self._place.get(v, -1) for v in saved) if begin <= at < end)
        key = tuple([self._number(at, begin) for at in range(first, last)]), reads
        found = self._hulls.corners(key)
        if found is None:
            found = self._corners(first, last, frozenset(self._made[begin + at] for at in reads))
            self._hulls.note(key, found)
        return found

    def _corners(self, first: int, last: int, reads: frozenset[int]) -> Corners:
        problem, begin = self._problem, self._starts[first]
        sizes, ops = problem.value_bytes, problem.ops[first:last]
        segment = Segment(value_bytes=sizes, ops=ops, reads=reads, unseen=problem.unseen)
        return [
            (
                dataclasses.replace(held, values=tuple(self._place[v] - begin for v in held.values)),
                rebuild_bytes(ops, sizes, held.rerun, reads),
            )
            for held in hull(segment, most=MOST_TRIES)
        ]

    def _number(self, at: int, begin: int) -> int:
        """Returns what stands for an op in a segment whose values are those from `begin` on."""
        inside = self._reads[at]
        num = len(inside)
        while num and inside[num - 1] < begin:
            num -= 1
        found = self._numbers[at].get(num)
        if found is None:
            problem, op = self._problem, self._problem.ops[at]
            found = self._numbers[at][num] = self._hulls.number(
                (
                    tuple(place - self._starts[at] for place in inside[:num]),
                    tuple((problem.value_bytes[v], v in problem.unseen, v in op.draws) for v in op.outputs),
                    op.seconds,
                    op.can_rerun,
                )
            )
        return found


def rebuild_bytes(ops: Sequence[Op], sizes: Sequence[int], rerun: Sequence[int], wanted: Collection[int]) -> int:
    """Returns the most that is there while ops run again, above what is held; as it runs them.

    Args:
        sizes: bytes of each value.
        rerun: positions of the ops, in order.
        wanted: values that stay: the others go after their last reader.
    """
    last = {v: at for at in rerun for v in ops[at].inputs}
    made: set[int] = set()
    alive, most = 0, 0
    for at in rerun:
        op = ops[at]
        outputs = [v for v in op.outputs if v not in op.draws] if op.draws else op.outputs
        for value in outputs:
            made.add(value)
            alive += sizes[value]
        most = max(most, alive)
        for value in outputs:
            if value not in last and value not in wanted:
                alive -= sizes[value]
        for value in op.inputs:
            if last[value] == at and value in made and value not in wanted:
                alive -= sizes[value]
    return most
