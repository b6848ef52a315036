"""What the step with everything rederived has to do with the plain one, and which of its leaves act together."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from recoup.ir.trace import Storage, Trace
from recoup.solver.disjoint_sets import DisjointSets
from recoup.solver.intervals import Interval, forward_ops
from recoup.solver.sequence import LONGEST_GROUP_LEAVES


class Rederivation:
    """A plain step beside the same step with everything rederived.

    The same forward ops make the same storages in the same order in both; where they do not, nothing is known.

    Args:
        plain: the step without a plan.
        other: with everything rederived.
        segments, other_segments: of each, one for one.
    """

    def __init__(
        self, plain: Trace, other: Trace, segments: Sequence[Interval], other_segments: Sequence[Interval]
    ) -> None:
        self._plain = plain
        self._other = other
        self._starts = [s.first for s in segments]
        self._other_starts = [s.first for s in other_segments]
        self._twins = _twins(plain, other)

    def dropped(self) -> set[int]:
        """Returns storages that are saved in the plain step and need not be when everything is rederived."""
        storages = self._other.storages
        return {
            own
            for own, index in self._twins.items()
            if storages[index].saved_op < 0 and self._plain.storages[own].saved_op >= 0
        }

    def charges(self) -> dict[int, int]:
        """Returns storage of the rederived step -> segment, for what a segment saves whether it rederives or not.

        It is counted for the same segment in both steps: nobody frees it by rederiving.
        """
        found = {}
        for own, index in self._twins.items():
            storage = self._plain.storages[own]
            if self._holders(own) & _segments(self._other.storages[index], self._other_starts):
                found[index] = _at(storage.saved_op, self._starts)
        return found

    def groups(self) -> dict[int, int]:
        """Returns segment -> group for segments that rederive from what others keep, or free something together."""
        sets = DisjointSets(len(self._starts))
        linked: set[int] = set()

        def join(here: int, there: int) -> None:
            linked.update((here, there))
            sets.join(here, there)

        for op, sources in self._other.rederive_links:
            here = _at(op, self._other_starts)
            for source in sources:
                saved_op = self._other.storages[source].saved_op
                there = _at(saved_op, self._other_starts) if saved_op >= 0 else here
                if there != here:
                    join(here, there)
        for holders in self._sharing():
            for there in holders[1:]:
                join(holders[0], there)
        return {segment: sets.find(segment) for segment in linked}

    def sharing(self) -> set[int]:
        """Returns the segments that hold something with others: it is freed only if all of them rederive."""
        return {segment for holders in self._sharing() for segment in holders}

    def _sharing(self) -> list[list[int]]:
        """Returns who holds a storage together, where they are near: what all layers read would link all of them."""
        found = [sorted(self._holders(own)) for own in sorted(self.dropped())]
        return [h for h in found if len(h) > 1 and h[-1] - h[0] < LONGEST_GROUP_LEAVES]

    def _holders(self, own: int) -> set[int]:
        return _segments(self._plain.storages[own], self._starts)


def _at(op: int, starts: Sequence[int]) -> int:
    return bisect.bisect_right(starts, op) - 1


def _segments(storage: Storage, starts: Sequence[int]) -> set[int]:
    return {_at(op, starts) for op in storage.saved_ops}


def _twins(plain: Trace, other: Trace) -> dict[int, int]:
    """Returns storage of the plain step -> the same one of the other."""
    own, others = forward_ops(plain), forward_ops(other)
    if len(own) != len(others):
        return {}
    twin_op = dict(zip(others, own, strict=True))
    made: dict[tuple[int, int], list[int]] = {}
    for index, storage in enumerate(other.storages):
        if storage.alloc_op in twin_op:
            made.setdefault((twin_op[storage.alloc_op], storage.nbytes), []).append(index)
    twins = {}
    for index, storage in enumerate(plain.storages):
        found = made.get((storage.alloc_op, storage.nbytes))
        if found:
            twins[index] = found.pop(0)
    return twins


def input_holders(trace: Trace) -> dict[int, list[int]]:
    """Returns for each storage the calls that take it as an input and save it inside, in call order."""
    holders: dict[int, list[int]] = {}
    for index, call in enumerate(trace.calls):
        for storage in call.inputs:
            if trace.storages[storage].saved_op >= 0:
                holders.setdefault(storage, []).append(index)
    return holders
