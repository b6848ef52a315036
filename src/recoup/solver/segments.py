"""Where segments of a forward end, and what each holds: the fastest plan by tensor whose estimated peak fits.

A forward is cut at narrow waists (`waists.py`) into *intervals*; a segment is one or more that follow each other, with
a few *labels*, ways to run it (`segment_labels.py`). Walking the forward, `held` is the sum of what the segments so far
hold. While backward runs segment `i..j` all that autograd would save inside is there again, so

    peak = fixed + held before i + max over r in i..j of (saved by i..r-1 + backward of r + gradients after r) + extra

where the second term comes from the plain step's timeline, and `extra` is what the label holds that autograd would
not. Forward's peak is what the model's own code has alive and what is held besides. For one budget the fastest
sequence of segments and labels is a shortest path over (place, held bytes): a dynamic program with dominated states
dropped. What the sum does not know (transients of a rebuild, views) the simulation corrects.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from recoup.solver.excerpts import Hulls
from recoup.solver.held_problem import HeldProblem, Label
from recoup.solver.segment_labels import LabelMaker
from recoup.thresholds import NEGLIGIBLE_SHARE

_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48)  # of segments, in intervals
MOST_PLACES = 96  # where a segment may end: the search is quadratic in them
_MOST_WAYS = MOST_PLACES * len(_LENGTHS)  # to get to a place that are followed; fewer lost plans a quarter dearer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan by tensor.

    Attributes:
        segments: (first op, label) of each.
        peak_bytes, extra_seconds: estimated.
    """

    segments: tuple[tuple[int, Label], ...]
    peak_bytes: int
    extra_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class _States:
    """The undominated ways to reach one place, a column each.

    Attributes:
        held, peak: bytes.
        seconds: run again.
        place, column: which state it came from.
        label: how, by number.
        holds: bits of what is held and alive in code, see `AliveInCode`.
    """

    held: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    peak: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    column: npt.NDArray[np.int64]
    label: npt.NDArray[np.int64]
    holds: npt.NDArray[np.int64]

    @classmethod
    def start(cls) -> _States:
        nothing = np.zeros(1, dtype=np.int64)
        return cls(nothing, np.zeros(1), nothing, nothing - 1, nothing, nothing, nothing)

    @classmethod
    def joined(cls, several: list[_States]) -> _States | None:
        """Returns the undominated ways of all, at most `_MOST_WAYS`; None if there are none."""
        if not several:
            return None
        columns = [np.concatenate([getattr(s, f.name) for s in several]) for f in dataclasses.fields(cls)]
        held, seconds, peak = columns[:3]
        # Ways come in runs that rise in bytes, so this is a merge; few are left for the whole order.
        order = np.argsort(held, kind="stable")
        order = order[seconds[order] <= np.minimum.accumulate(seconds[order])]
        order = order[np.lexsort((peak[order], seconds[order], held[order]))]
        fastest = np.minimum.accumulate(seconds[order])
        is_better = np.concatenate([[True], fastest[1:] < fastest[:-1]])
        order = order[is_better]
        if len(order) > _MOST_WAYS:
            order = order[np.round(np.linspace(0, len(order) - 1, _MOST_WAYS)).astype(np.int64)]
        return cls(*(column[order] for column in columns))


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """The labels of one segment as arrays, a row each.

    Attributes:
        held, backward, after_saved: bytes, in one column.
        shared: bytes, a column for each place where the segment before may begin.
        share_bits, shares: of earlier values, in one column, and their bytes, a column for each bit.
        seconds, holds: as those of labels. saves: whether one saves what autograd saves.
        bits, most, alive, starts: what labels say of forward, a row each: bytes, and of each bit those that it takes
            away; where the rows of each label start.
    """

    labels: list[Label]
    held: npt.NDArray[np.int64]
    backward: npt.NDArray[np.int64]
    after_saved: npt.NDArray[np.int64]
    shared: npt.NDArray[np.int64]
    share_bits: npt.NDArray[np.int64]
    shares: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    holds: npt.NDArray[np.int64]
    saves: list[bool]
    bits: npt.NDArray[np.int64]
    most: npt.NDArray[np.int64]
    alive: npt.NDArray[np.int64]
    starts: list[int]

    @classmethod
    def of(cls, labels: list[Label], i: int) -> _Rows:
        """Returns the rows of a segment that begins with interval `i`."""
        places: dict[int, int] = {}  # of bits
        starts: list[int] = []
        most: list[int] = []
        alive: list[list[tuple[int, int]]] = []
        for label in labels:
            starts.append(len(most))
            for nbytes, values in label.forward:
                most.append(nbytes)
                alive.append([(places.setdefault(bit, len(places)), size) for bit, size in values if bit])
        bits: dict[int, int] = {}  # the places of those that are shared
        shares = [[(bits.setdefault(bit, len(bits)), size) for bit, size in label.shares] for label in labels]

        def spread(rows: list[list[tuple[int, int]]], num: int) -> npt.NDArray[np.int64]:
            found = np.zeros((len(rows), num), dtype=np.int64)
            for row, sizes in zip(found, rows, strict=True):
                for place, size in sizes:
                    row[place] += size
            return found

        def column(rows: list[int]) -> npt.NDArray[np.int64]:
            return np.array(rows, dtype=np.int64)[:, None]

        return cls(
            labels,
            held=column([label.held_bytes for label in labels]),
            backward=column([label.backward_bytes for label in labels]),
            after_saved=column([label.after_saved_bytes for label in labels]),
            shared=np.array([label.shared_bytes or (0,) * max(i, 1) for label in labels], dtype=np.int64),
            share_bits=column(list(bits)),
            shares=spread(shares, len(bits)),
            seconds=np.array([label.seconds for label in labels]),
            holds=np.array([label.holds for label in labels], dtype=np.int64),
            saves=[label.held is None for label in labels],
            bits=column(list(places)),
            most=column(most),
            alive=spread(alive, len(places)),
            starts=starts,
        )

    def forward(self, masks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns forward's peak above what segments before hold: a column for each number of bits of that."""
        left = self.most - self.alive @ ((self.bits & masks) != 0)
        return np.maximum(np.maximum.reduceat(left, self.starts), 0)  # type: ignore[no-any-return]


class SegmentSolver:
    """Solves one problem for any number of budgets; equal segments are cut once.

    Args:
        in_pieces: segments may be rebuilt in pieces, where nothing else fits: what is before the last runs twice again.
        hulls: of segments, those of like problems; new ones are added.
    """

    def __init__(self, problem: HeldProblem, *, in_pieces: bool = False, hulls: Hulls | None = None) -> None:
        self.problem = problem
        self._in_pieces = in_pieces
        self._leanest: Choice | None = None
        self._maker = LabelMaker(problem, hulls)
        self._rows: dict[tuple[int, int, bool], _Rows | None] = {}

    def solve(self, budget_bytes: int) -> Choice | None:
        """Returns the fastest choice whose estimated peak is at most `budget_bytes`, None if there is none."""
        choice = self._solve(budget_bytes, nested=False)
        return self._solve(budget_bytes, nested=True) if choice is None and self._in_pieces else choice

    def leanest(self) -> Choice | None:
        """Returns a choice with about the smallest estimated peak, found once."""
        if self._leanest is None:
            self._leanest = self._find_leanest()
        return self._leanest

    def _find_leanest(self) -> Choice | None:
        problem = self.problem
        most = sum(problem.saved_bytes) + max(problem.gradient_bytes, default=0)
        most += max(*problem.backward_bytes, *problem.forward_bytes, problem.after_bytes)
        low, step = problem.fixed_bytes, most // 16 + 1
        best = None
        while best is None and step <= 2 * most:  # from below: long segments are never looked at
            best = self._solve(problem.fixed_bytes + step, nested=self._in_pieces)
            low, step = (low, step) if best is not None else (problem.fixed_bytes + step, 2 * step)
        high = min(problem.fixed_bytes + step, best.peak_bytes) if best is not None else low
        while best is not None and high - low > max(NEGLIGIBLE_SHARE * high, 1):
            middle = (low + high) // 2
            found = self._solve(middle, nested=self._in_pieces)
            if found is None:
                low = middle
            else:
                best, high = found, min(middle, found.peak_bytes)
        return best

    def _solve(self, budget_bytes: int, *, nested: bool) -> Choice | None:
        problem = self.problem
        num, room = len(problem.places), budget_bytes - problem.fixed_bytes
        labels: list[Label] = []
        saves: list[bool] = []
        arriving: list[list[_States]] = [[] for _ in range(num + 1)]
        arriving[0] = [_States.start()]
        reached: list[_States | None] = []
        for i in range(num + 1):
            states = _States.joined(arriving[i])
            reached.append(states)
            if states is None or i == num:
                continue
            after_saved = np.array(saves, dtype=bool)[states.label] if i else np.zeros(1, dtype=bool)
            alive = self._maker.alive
            masks, which = np.unique(states.holds & alive.mask(alive.at(i)), return_inverse=True)
            for j in self._next_places(i):
                kept = states.holds & ~alive.made_in(i, j)
                fits_at_once = self._maker.backward_bytes(i, j) <= room
                if not (fits_at_once or nested) or problem.backward_bytes[j - 1] > room:
                    break
                for rows in self._rows_of(i, j, fits_at_once, nested):
                    shared = rows.shared[:, states.place]
                    if after_saved.any():
                        shared = np.where(after_saved, rows.after_saved, shared)
                    if len(rows.share_bits):
                        shared = shared + rows.shares @ ((rows.share_bits & states.holds) == 0)
                    held = states.held + rows.held + shared
                    peak = states.held + np.maximum(rows.forward(masks)[:, which], rows.backward) + shared
                    at, fits = np.nonzero((peak <= room) & (held <= room))
                    if not len(fits):
                        continue
                    seconds = states.seconds[fits] + rows.seconds[at]
                    most = np.maximum(peak[at, fits], states.peak[fits])
                    same = np.full(len(fits), i), fits, at + len(labels)
                    arriving[j].append(_States(held[at, fits], seconds, most, *same, kept[fits] | rows.holds[at]))
                    labels += rows.labels
                    saves += rows.saves
        last = reached[num]
        if last is None:
            return None
        fits = np.flatnonzero(last.held + problem.after_bytes <= room)
        if not len(fits):
            return None
        column = min(fits.tolist(), key=lambda c: (last.seconds[c], last.held[c]))
        peak_bytes = max(int(last.peak[column]), int(last.held[column]) + problem.after_bytes)
        took = float(last.seconds[column])
        segments: list[tuple[int, Label]] = []
        here = last
        while (place := int(here.place[column])) >= 0:
            segments.append((problem.places[place], labels[here.label[column]]))
            before, column = reached[place], int(here.column[column])
            assert before is not None
            here = before
        segments.reverse()
        return Choice(segments=tuple(segments), peak_bytes=peak_bytes + problem.fixed_bytes, extra_seconds=took)

    def _rows_of(self, i: int, j: int, at_once: bool, nested: bool) -> list[_Rows]:
        """Returns the ways to run intervals [i, j), rebuilt at once, in pieces, or both."""
        found = []
        for is_wanted, make, is_nested in ((at_once, self._maker.labels, False), (nested, self._maker.nested, True)):
            key = (i, j, is_nested)
            if is_wanted and key not in self._rows:
                labels = make(i, j)
                self._rows[key] = _Rows.of(labels, i) if labels else None
            rows = self._rows[key] if is_wanted else None
            found += [] if rows is None else [rows]
        return found

    def _next_places(self, i: int) -> list[int]:
        num = len(self.problem.places)
        ends = [i + length for length in _LENGTHS if i + length <= num]
        return ends if not ends or ends[-1] == num or num - i > _LENGTHS[-1] else [*ends, num]
