"""The ways to run one segment of a forward: what it holds, what runs again, and the bytes that takes.

A segment of intervals [i, j) has a few *labels*, the corners of its hull of (held bytes, seconds run again) by minimum
cut (`held.py`); for one interval the first is to save what autograd saves. Equal segments are cut once.

A *nested* label rebuilds the segment in pieces: its first rebuild runs the ops up to what the pieces start from and
holds that, then each piece is rebuilt from it when backward gets there. So backward never has more than one piece
there, and every op before the last piece runs twice again.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from recoup.solver.alive_in_code import AliveInCode
from recoup.solver.excerpts import Excerpts, Hulls, rebuild_bytes
from recoup.solver.held_problem import HeldProblem, Label

_MOST_OPS = 800  # of a segment that is run again: longer ones would have to hold all of it at once


class LabelMaker:
    """Makes the labels of the segments of one problem, each once; `hulls`: those known of this and other problems."""

    def __init__(self, problem: HeldProblem, hulls: Hulls | None = None) -> None:
        self.problem = problem
        self._maker = {v: i for i, op in enumerate(problem.ops) for v in op.outputs}
        self._ends = (*problem.places[1:], len(problem.ops))
        self._readers: dict[int, list[int]] = {}
        for i, op in enumerate(problem.ops):
            for value in op.inputs:
                self._readers.setdefault(value, []).append(self._interval(i))
        first_saved: dict[int, int] = {}
        self._savers: dict[int, list[int]] = {}
        for i, values in enumerate(problem.saves):
            for value in values:
                if value in self._maker:
                    first_saved.setdefault(value, i)
                    self._savers.setdefault(value, []).append(self._interval(i))
        self._bare = np.array(problem.bare_bytes, dtype=np.int64)
        self.alive = AliveInCode(problem, first_saved, self._maker)
        self._first_saved = {value: self._interval(at) for value, at in first_saved.items()}  # in which interval
        self._excerpts = Excerpts(problem, self._maker, Hulls() if hulls is None else hulls)
        self._labels: dict[tuple[int, int], list[Label]] = {}
        self._nested: dict[tuple[int, int], list[Label]] = {}

    def labels(self, i: int, j: int) -> list[Label]:
        """Returns the labels of the segment of intervals [i, j), that of saving first (if it is one interval)."""
        found = self._labels.get((i, j))
        if found is None:
            found = self._labels[i, j] = self._make_labels(i, j)
        return found

    def nested(self, i: int, j: int) -> list[Label]:
        """Returns labels that rebuild the segment of intervals [i, j) in equal pieces."""
        found = self._nested.get((i, j))
        if found is None:
            num = j - i
            lengths = {1, round(num**0.5), -(-num // 2)} if num > 1 else set()
            found = self._nested[i, j] = []
            for length in sorted(lengths):
                made = self._in_pieces(i, j, [*range(i, j, length), j])
                if made is not None:
                    found.append(made)
        return found

    def backward_bytes(self, i: int, j: int) -> int:
        """Returns the peak of backward through intervals [i, j) above what is held before, all rebuilt at once."""
        problem = self.problem
        most, saved = 0, 0
        for r in range(i, j):
            most = max(most, saved + problem.backward_bytes[r] + problem.gradient_bytes[r])
            saved += problem.saved_bytes[r]
        return most

    def _forward(
        self, i: int, j: int, charged: list[int], shared: Collection[int] = ()
    ) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """Returns `Label.forward` of intervals [i, j).

        Args:
            charged: values that this segment holds.
            shared: values that it or one before it holds.
        """
        problem = self.problem
        if not problem.bare_bytes:
            inside = zip(problem.forward_bytes[i:j], problem.saved_bytes[i:j], strict=True)
            return ((sum(problem.value_bytes[v] for v in charged) + max(0, *(f - s for f, s in inside)), ()),)
        sizes, released, own, bits = problem.value_bytes, problem.released, set(charged), self.alive.bits
        earlier = [v for v in self.alive.at(i) if v not in own and v not in shared]
        first, end = problem.places[i], self._ends[j - 1]
        # A held value that nothing else would keep is there from its maker on, beside what plain forward counts.
        num = end - first
        rises = [0] * (num + 1)
        for value in charged:
            rises[min(max(self._maker[value] - first, released[value] + 1 - first, 0), num)] += sizes[value]
        for value in shared:  # counted with what is held
            rises[0] -= sizes[value]
            rises[min(released[value] + 1 - first, num)] += sizes[value]
        there = self._bare[first:end] + np.array(rises[:num]).cumsum()
        found: dict[tuple[tuple[int, int], ...], int] = {}
        ends = sorted({end, *(released[v] + 1 for v in earlier if first <= released[v] < end - 1)})
        for begin, stop in itertools.pairwise((first, *ends)):
            alive = [v for v in earlier if released[v] >= begin]
            key = tuple((bits[v], sizes[v]) for v in alive)
            found[key] = max(found.get(key, 0), int(there[begin - first : stop - first].max()))
        return tuple((most, alive) for alive, most in found.items())

    def _make_labels(self, i: int, j: int) -> list[Label]:
        problem = self.problem
        first, last = problem.places[i], self._ends[j - 1]
        backward = self.backward_bytes(i, j)
        labels = []
        if j == i + 1:
            saved_here = self._saved_in(i)
            own = [v for v in saved_here if self._first_saved.get(v, -1) == i]
            shared = self.alive.shared_at(i, saved_here)
            labels.append(
                Label(
                    held=None,
                    held_bytes=problem.saved_bytes[i],
                    forward=self._forward(i, j, own, shared),
                    holds=self.alive.mask(saved_here, j),
                    backward_bytes=backward,
                    seconds=0.0,
                    shares=self._sized(shared),
                    shared_bytes=self._dropped_bytes(i, saved_here - shared.keys()),
                )
            )
        if last - first > _MOST_OPS:
            return labels
        names = self._excerpts.made(first, last)
        made = set(names)
        saved = dict.fromkeys(v for values in problem.saves[first:last] for v in values)
        # An op's inputs are saved before it begins a segment: what the one before it has there anyway is left to that.
        inside = {v for values in problem.saves[first + 1 : last] for v in values}
        left = [v for v in problem.saves[first] if v in problem.self_saved and v not in inside and v not in made]
        outside = [v for v in saved if v not in made and v in self._maker and v not in left]
        if j < len(problem.places):
            saved.update(dict.fromkeys(v for v in problem.saves[last] if v in problem.self_saved and v in made))
        after = problem.gradient_bytes[j - 1] + (problem.entering_bytes[j - 1] if problem.entering_bytes else 0)
        for held, most_bytes in self._excerpts.corners(first, last, saved):
            values, rerun = [names[v] for v in held.values], [first + at for at in held.rerun]
            needed = dict.fromkeys([*outside, *self._read_from_before(rerun, made)])
            shared = self.alive.shared_at(i, needed)
            others = [v for v in needed if v not in shared]
            charged = [*values, *(v for v in others if self._reader_before(v, i) is None)]
            held_bytes = sum(problem.value_bytes[v] for v in charged)
            labels.append(
                Label(
                    held=tuple(sorted({*values, *needed})),
                    held_bytes=held_bytes,
                    forward=self._forward(i, j, charged, shared),
                    holds=self.alive.mask([*values, *needed], j),
                    backward_bytes=max(
                        backward + self._beside_bytes(charged, i),
                        held_bytes + most_bytes + after,
                    ),
                    seconds=held.seconds,
                    shares=self._sized(shared),
                    shared_bytes=self._shared_bytes(others, i),
                    after_saved_bytes=self._after_saved_bytes(others, i)
                    + sum(problem.value_bytes[v] for v in left if v not in needed),
                )
            )
        return labels

    def _in_pieces(self, i: int, j: int, places: list[int]) -> Label | None:
        """Returns the label that rebuilds [i, j) in pieces between `places`, each holding as little as it can."""
        problem = self.problem
        first, last = problem.places[i], self._ends[j - 1]
        sizes = problem.value_bytes
        made = set(self._excerpts.made(first, last))
        pieces: list[tuple[int, Label]] = []
        for start, end in itertools.pairwise(places):
            labels = [label for label in self.labels(start, end) if label.held is not None]
            if not labels:
                return None
            pieces.append((start, min(labels, key=lambda label: label.held_bytes)))
        wanted = {v for _, label in pieces for v in label.held or ()}
        inside = [v for v in wanted if v in made]
        # The first rebuild: every op that leads to what the pieces start from; what cannot run again is held.
        held = {v for v in wanted if v not in made}
        rerun: set[int] = set()
        stack = list(inside)
        while stack:
            value = stack.pop()
            at = self._maker.get(value)
            if at is None or at in rerun or value in held:
                continue
            if value not in made or not problem.ops[at].can_rerun or value in problem.ops[at].draws:
                held.add(value)
                continue
            rerun.add(at)
            stack.extend(problem.ops[at].rerun_reads)
        shared = self.alive.shared_at(i, (v for v in held if v not in made))
        before = [v for v in held if v not in made and v not in shared]
        charged = [v for v in held if v in made or (v not in shared and self._reader_before(v, i) is None)]
        there = set(charged)
        backward = sum(sizes[v] for v in charged) + rebuild_bytes(problem.ops, sizes, sorted(rerun), set(inside))
        backward += problem.gradient_bytes[j - 1] + (problem.entering_bytes[j - 1] if problem.entering_bytes else 0)
        for (start, label), end in zip(pieces, places[1:], strict=True):
            there.update(v for v in label.held or () if v in made)  # what later pieces start from is gone by then
            backward = max(backward, self.backward_bytes(start, end) + self._beside_bytes(there, start))
        return Label(
            held=tuple(sorted(held)),
            held_bytes=sum(sizes[v] for v in charged),
            forward=self._forward(i, j, charged, shared),
            holds=self.alive.mask(held, j),
            backward_bytes=backward,
            seconds=sum(problem.ops[at].seconds for at in rerun) + sum(label.seconds for _, label in pieces),
            shares=self._sized(shared),
            shared_bytes=self._shared_bytes(before, i),
            after_saved_bytes=self._after_saved_bytes(before, i),
            pieces=tuple(
                (problem.places[start], tuple(v for v in label.held or () if v not in held)) for start, label in pieces
            ),
        )

    def _read_from_before(self, ops: list[int], made: set[int]) -> list[int]:
        """Returns the values that these ops read and earlier segments made."""
        return [v for at in ops for v in self.problem.ops[at].inputs if v not in made and v in self._maker]

    def _reader_before(self, value: int, i: int) -> int | None:
        """Returns the last interval between a value's maker and interval `i` whose segment holds it, None if none does.

        Which of its readers run again is not known: those hold it that autograd saves it for. One that it is saved for
        nowhere is held by who reads it, if many do.
        """
        readers = self._savers.get(value) or self._readers.get(value, [])
        maker = self._interval(self._maker[value])
        at = bisect.bisect_left(readers, i)
        if not at or readers[at - 1] <= maker or (value not in self._savers and len({*readers} - {maker}) <= 2):
            return None
        return readers[at - 1]

    def _shared_bytes(self, values: Iterable[int], i: int) -> tuple[int, ...]:
        """Returns the bytes of earlier values that a segment before interval `i` does not hold, by where it begins.

        It holds what it reads and did not make, but for what it leaves to the one before. What nobody read before is
        charged in any case.
        """
        found = [0] * i
        for value in values:
            reader = self._reader_before(value, i)
            if reader is not None:
                maker = self._interval(self._maker[value])
                for begin in (*range(maker + 1), *range(reader + (not self._is_left(value, reader)), i)):
                    found[begin] += self.problem.value_bytes[value]
        return tuple(found) if any(found) else ()

    def _is_left(self, value: int, i: int) -> bool:
        """Whether a segment that begins with interval `i` leaves a value that is saved there to the one before."""
        later = self.problem.saves[self.problem.places[i] + 1 : self._ends[i]]
        return value in self.problem.self_saved and not any(value in values for values in later)

    def _after_saved_bytes(self, values: Iterable[int], i: int) -> int:
        """Returns the bytes of earlier values that the interval before `i` makes or reads and does not save."""
        charged = 0
        saved = self._saved_in(i - 1) if i else set()
        for value in values:
            reader = self._reader_before(value, i)
            if reader is not None and value not in saved and i - 1 in (reader, self._interval(self._maker[value])):
                charged += self.problem.value_bytes[value]
        return charged

    def _sized(self, shared: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
        return tuple((bit, self.problem.value_bytes[v]) for v, bit in shared.items())

    def _dropped_bytes(self, i: int, saved: Iterable[int]) -> tuple[int, ...]:
        """Returns the bytes that are saved in interval `i` and before, by where a segment begins that drops them."""
        found = [0] * i
        for value in saved:
            if 0 <= self._first_saved.get(value, -1) < i:
                reader = self._reader_before(value, i)
                left = [] if reader is None or not self._is_left(value, reader) else [reader]
                for begin in (*range(self._interval(self._maker[value]) + 1), *left):
                    found[begin] += self.problem.value_bytes[value]
        return tuple(found) if any(found) else ()

    def _saved_in(self, i: int) -> set[int]:
        """Returns the values that autograd saves in interval `i`, made there or before."""
        return {v for at in range(self.problem.places[i], self._ends[i]) for v in self.problem.saves[at]}

    def _beside_bytes(self, values: Iterable[int], i: int) -> int:
        """Returns the bytes of held values that plain backward from interval `i` on does not count as saved."""
        sizes, first = self.problem.value_bytes, self._first_saved
        return sum([sizes[v] for v in values if first.get(v, -1) < i])

    def _interval(self, op: int) -> int:
        return bisect.bisect_right(self.problem.places, op) - 1
