"""Where segments of a forward end, and what each holds: the fastest plan by tensor whose estimated peak fits.

A forward is cut at narrow waists (`waists.py`) into *intervals*; a segment is one or more that follow each other. Each
segment has a few *labels*, the corners of its hull of (held bytes, seconds run again) by minimum cut (`held.py`); the
first is to save what autograd saves. Walking the forward, `held` is the sum of what the segments so far hold. While
backward runs segment `i..j` all that autograd would save inside is there again, so

    peak = fixed + held before i + max over r in i..j of (saved by i..r-1 + backward of r + gradients after r) + extra

where the second term is read off the plain step's timeline, and `extra` is what the label holds that autograd would
not. Forward's peak is bounded alike, less what autograd would save there where the segment is rebuilt. For one budget
the fastest sequence of segments and labels is a shortest path over (place, held bytes): a dynamic program with
dominated states dropped. What the sum does not know (transients of a rebuild, views) the simulation corrects.
"""

from __future__ import annotations

import bisect
import dataclasses

from recoup.solver.held import Held, Op, Segment, hull

_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # of segments, in intervals
_LABELS = 5  # of a segment beside saving
_STATES = 96  # of one place
_MOST_OPS = 800  # of a segment that is run again: longer ones would have to hold all of it at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldProblem:
    """A forward by its ops, and what the plain step says of its intervals.

    Attributes:
        ops: in forward order. value_bytes: of each value; 0: held anyway.
        saves: for each op the values that autograd saves with it.
        places: the ops that intervals begin with, the first op included.
        saved_bytes, forward_bytes, backward_bytes, gradient_bytes: of each interval: what it leaves saved, its peaks in
            forward and backward above the level before it, and the gradients that exist while its backward runs.
        fixed_bytes: there all the time. after_bytes: peak of what follows the model (the loss), above `fixed + held`.
    """

    ops: tuple[Op, ...]
    value_bytes: tuple[int, ...]
    saves: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    fixed_bytes: int
    after_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One way to run a segment.

    Attributes:
        held: values held (None: what autograd saves, nothing is run again). held_bytes: theirs, with those of earlier
            segments that this one needs. extra_bytes: of them, what autograd would not save. seconds: run again.
    """

    held: tuple[int, ...] | None
    held_bytes: int
    extra_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan by tensor.

    Attributes:
        segments: (first op, label) of each. peak_bytes, extra_seconds: estimated.
    """

    segments: tuple[tuple[int, Label], ...]
    peak_bytes: int
    extra_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    held_bytes: int
    seconds: float
    peak_bytes: int
    previous: _State | None
    place: int
    label: Label | None


class SegmentSolver:
    """Solves one problem for any number of budgets; equal segments are cut once."""

    def __init__(self, problem: HeldProblem) -> None:
        self.problem = problem
        self._maker = {v: i for i, op in enumerate(problem.ops) for v in op.outputs}
        self._ends = (*problem.places[1:], len(problem.ops))
        self._readers: dict[int, list[int]] = {}
        for i, op in enumerate(problem.ops):
            for value in op.inputs:
                self._readers.setdefault(value, []).append(bisect.bisect_right(problem.places, i) - 1)
        self._hulls: dict[Segment, list[Held]] = {}
        self._labels: dict[tuple[int, int], list[Label]] = {}

    def solve(self, budget_bytes: int) -> Choice | None:
        """Returns the fastest choice whose estimated peak is at most `budget_bytes`, None if there is none."""
        problem = self.problem
        num = len(problem.places)
        states: list[list[_State]] = [[] for _ in range(num + 1)]
        states[0] = [_State(0, 0.0, 0, None, 0, None)]
        for i in range(num):
            for j in self._next_places(i):
                backward = self._backward_bytes(i, j)
                if problem.fixed_bytes + backward > budget_bytes:
                    break
                for label in self.labels(i, j):
                    inside = max(backward + label.extra_bytes, self._forward_bytes(i, j, label))
                    for state in states[i]:
                        peak = problem.fixed_bytes + state.held_bytes + inside
                        if peak > budget_bytes:
                            continue
                        held = state.held_bytes + label.held_bytes
                        if held + problem.fixed_bytes > budget_bytes:
                            continue
                        seconds = state.seconds + label.seconds
                        states[j].append(_State(held, seconds, max(peak, state.peak_bytes), state, i, label))
            states[i + 1] = _undominated(states[i + 1])
        fitting = [s for s in states[num] if s.held_bytes + problem.fixed_bytes + problem.after_bytes <= budget_bytes]
        if not fitting:
            return None
        best = min(fitting, key=lambda s: (s.seconds, s.held_bytes))
        segments: list[tuple[int, Label]] = []
        at: _State | None = best
        while at is not None and at.label is not None:
            segments.append((problem.places[at.place], at.label))
            at = at.previous
        segments.reverse()
        return Choice(
            segments=tuple(segments),
            peak_bytes=max(best.peak_bytes, best.held_bytes + problem.fixed_bytes + problem.after_bytes),
            extra_seconds=best.seconds,
        )

    def leanest(self) -> Choice | None:
        """Returns a choice with about the smallest estimated peak."""
        low, high = self.problem.fixed_bytes, self.problem.fixed_bytes + sum(self.problem.saved_bytes)
        high += max(self.problem.backward_bytes, default=0) + max(self.problem.gradient_bytes, default=0)
        best = self.solve(high)
        while best is not None and high - low > high // 1000:
            middle = (low + high) // 2
            found = self.solve(middle)
            if found is None:
                low = middle
            else:
                best, high = found, middle
        return best

    def _next_places(self, i: int) -> list[int]:
        num = len(self.problem.places)
        ends = [i + length for length in _LENGTHS if i + length <= num]
        return ends if not ends or ends[-1] == num or num - i > _LENGTHS[-1] else [*ends, num]

    def _backward_bytes(self, i: int, j: int) -> int:
        """Returns the peak of backward through intervals [i, j) above what was held before them."""
        most, saved = 0, 0
        for r in range(i, j):
            most = max(most, saved + self.problem.backward_bytes[r] + self.problem.gradient_bytes[r])
            saved += self.problem.saved_bytes[r]
        return most

    def _forward_bytes(self, i: int, j: int, label: Label) -> int:
        """Returns the peak of forward through intervals [i, j) above what was held before them: a lower bound."""
        forward, saved = self.problem.forward_bytes[i:j], self.problem.saved_bytes[i:j]
        if label.held is None:
            return max(forward)
        return label.held_bytes + max(0, *(f - s for f, s in zip(forward, saved, strict=True)))

    def labels(self, i: int, j: int) -> list[Label]:
        """Returns the labels of the segment of intervals [i, j), that of saving first (if it is one interval)."""
        found = self._labels.get((i, j))
        if found is None:
            found = self._labels[i, j] = self._make_labels(i, j)
        return found

    def _make_labels(self, i: int, j: int) -> list[Label]:
        problem = self.problem
        first, last = problem.places[i], self._ends[j - 1]
        labels = []
        if j == i + 1:
            labels.append(Label(held=None, held_bytes=problem.saved_bytes[i], extra_bytes=0, seconds=0.0))
        if last - first > _MOST_OPS:
            return labels
        made = {v for op in problem.ops[first:last] for v in op.outputs}
        saved = dict.fromkeys(v for at in range(first, last) for v in problem.saves[at])
        outside = [v for v in saved if v not in made and v in self._maker]
        local: dict[int, int] = {}
        for op in problem.ops[first:last]:
            for value in (*op.inputs, *op.outputs):
                local.setdefault(value, len(local))
        names = list(local)
        segment = Segment(
            value_bytes=tuple(problem.value_bytes[v] for v in names),
            ops=tuple(
                dataclasses.replace(
                    op, inputs=tuple(local[v] for v in op.inputs), outputs=tuple(local[v] for v in op.outputs)
                )
                for op in problem.ops[first:last]
            ),
            reads=frozenset(local[v] for v in saved if v in made),
        )
        for held in self._hull(segment):
            values = [names[v] for v in held.values]
            needed = dict.fromkeys(outside)
            for at in held.rerun:
                needed.update(
                    dict.fromkeys(v for v in problem.ops[first + at].inputs if v not in made and v in self._maker)
                )
            from_before = [v for v in needed if self._is_charged(v, i, j)]
            extra = [v for v in (*values, *from_before) if v not in saved]
            labels.append(
                Label(
                    held=tuple(sorted({*values, *needed})),
                    held_bytes=sum(problem.value_bytes[v] for v in (*values, *from_before)),
                    extra_bytes=sum(problem.value_bytes[v] for v in extra),
                    seconds=held.seconds,
                )
            )
        return labels

    def _is_charged(self, value: int, i: int, j: int) -> bool:
        """Whether a segment pays for a value that an earlier one made: not again for one that many of them read."""
        maker = bisect.bisect_right(self.problem.places, self._maker[value]) - 1
        later = sorted({r for r in self._readers.get(value, ()) if r > maker})
        return len(later) <= 2 or i <= later[0] < j

    def _hull(self, segment: Segment) -> list[Held]:
        found = self._hulls.get(segment)
        if found is None:
            found = self._hulls[segment] = hull(segment, most=_LABELS)
        return found


def _undominated(states: list[_State]) -> list[_State]:
    """Returns the states that no other beats in both bytes and seconds, thinned to a number."""
    states.sort(key=lambda s: (s.held_bytes, s.seconds, s.peak_bytes))
    kept: list[_State] = []
    for state in states:
        if not kept or state.seconds < kept[-1].seconds:
            kept.append(state)
    if len(kept) <= _STATES:
        return kept
    step = (len(kept) - 1) / (_STATES - 1)
    return [kept[round(k * step)] for k in range(_STATES)]
