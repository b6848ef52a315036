"""Choices for the calls of a compiled step: those of one graph share one, or some calls in a row have another.

What one call holds is there in all that comes between its forward and its backward. So the first calls of equal blocks
count at more levels than the last ones, which often need to run nothing again. A *mixture* has a choice for each call,
a few different ones for each graph (each is compiled). Mixtures are reached by changes: some calls of a graph in a row
go to one choice. What all changes of a mixture lead to is computed at once, by running maxima: levels before a change
stay, those after it move by what it holds more or less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy

from recoup.compiled.schedule import Timeline
from recoup.thresholds import MOST_POINTS, MOST_WAYS, NEGLIGIBLE_SHARE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A step's levels without what its calls hold and take.

    Attributes:
        forward, backward: for each call, in forward's order. between: for n from 0 the highest level outside of calls
            while n of them hold what backward reads.
        handed: what each call is handed by the one before, if either of them held it in the step that ran; None where
            callers keep all results.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    between: tuple[int, ...]
    handed: tuple[int, ...] | None = None

    def peak_bytes(self, chosen: Sequence[Timeline]) -> int:
        """Returns the peak of a step by a choice for each call."""
        held, behind, grown, result, peak = 0, 0, 0, 0, self.between[0]
        for i, made in enumerate(chosen):
            peak = max(peak, self.forward[i] + held + grown + made.forward_peak_bytes)
            if self.handed is not None:
                # It is there if either holds it. By backward the caller let it go; forward it is there anyway, or was
                # let go where neither held it in the step that ran.
                handed = max(result, made.held_input_bytes)
                behind, grown = behind + handed, grown + max(0, handed - self.handed[i])
                result = made.held_result_bytes
            peak = max(peak, self.backward[i] + held + behind + made.backward_peak_bytes)
            held += made.held_bytes
            peak = max(peak, self.between[i + 1] + held + grown)
        return peak


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """What changes of a mixture lead to: of a graph's calls from `first` to before `end` to the choice `to`."""

    peaks: Any
    seconds: Any
    first: Any
    end: Any
    to: Any


class Mixtures:
    """Choices for the calls of a step. A mixture is the numbers of its calls' choices, all graphs' in one table.

    Args:
        options: of each graph, by rising seconds.
    """

    def __init__(self, base: Base, calls: Sequence[str], options: Mapping[str, Sequence[Timeline]]) -> None:
        self._base = base
        self._table = [made for name in dict.fromkeys(calls) for made in options[name]]
        self._rows: dict[str, range] = {}
        self._places = {name: numpy.flatnonzero([c == name for c in calls]) for name in dict.fromkeys(calls)}
        begin = 0
        for name in self._places:
            self._rows[name] = range(begin, begin + len(options[name]))
            begin += len(options[name])
        self._fastest = numpy.array([self._rows[name][0] for name in calls])
        self._forward = numpy.array([t.forward_peak_bytes for t in self._table])
        self._backward = numpy.array([t.backward_peak_bytes for t in self._table])
        self._held = numpy.array([t.held_bytes for t in self._table])
        # There in backward of later calls, exactly so where neighbours choose alike.
        handed = [max(t.held_result_bytes, t.held_input_bytes) if base.handed is not None else 0 for t in self._table]
        self._behind = self._held + numpy.array(handed)
        self._seconds = numpy.array([t.seconds for t in self._table])

    def found(self, divisible: Collection[str]) -> list[tuple[Timeline, ...]]:
        """Returns mixtures worth choosing from, a choice for each call.

        Args:
            divisible: graphs whose calls may get different choices.
        """
        uniform = self._uniform()
        front = _undominated([(*self._figures(made), made) for made in uniform])
        done: set[bytes] = set()
        for _ in range(MOST_WAYS if divisible else 0):
            left = [made for *_, made in front if made.tobytes() not in done]
            done |= {made.tobytes() for made in left}
            better = [new for made in left for new in self._better(made, divisible, front)]
            front = _thinned(_undominated([*front, *better]))
        # What was left out since others are near to it may be what beats one that all calls share.
        return [tuple(self._table[at] for at in made) for made in [*uniform, *(made for *_, made in front)]]

    def _figures(self, made: Any) -> tuple[int, float]:
        chosen = [self._table[at] for at in made]
        return self._base.peak_bytes(chosen), sum(t.seconds for t in chosen)

    def _uniform(self) -> list[Any]:
        """Returns mixtures in which the calls of a graph share a choice, from the fastest to the leanest."""
        made = self._fastest
        found = [made]
        while True:
            peak, seconds = self._figures(made)
            best: tuple[float, float, str, int] | None = None
            for name, places in self._places.items():
                for changes in self._changes(made, name, [0, len(places)]):
                    for to in range(made[places[0]] + 1, self._rows[name].stop):
                        i = to - self._rows[name].start
                        gain, cost = peak - changes.peaks[i], changes.seconds[i] - seconds
                        rank = (-gain / max(cost, 1e-12), cost) if gain > 0 else (0.0, cost)
                        if best is None or (*rank, name, to) < best:
                            best = (*rank, name, to)
            if best is None:
                return found
            *_, name, last = best
            places = self._places[name]
            for to in range(made[places[0]] + 1, last + 1):
                made = made.copy()  # what lies between saves less for its seconds, but may be all that a budget needs
                made[places] = to
                found.append(made)

    def _better(
        self, made: Any, divisible: Collection[str], front: Sequence[tuple[int, float, Any]]
    ) -> Iterator[tuple[int, float, Any]]:
        """Yields mixtures one change away that no mixture of a front beats, with peak and seconds."""
        known = numpy.array([peak for peak, *_ in front])
        least = numpy.array([numpy.inf, *(seconds for _, seconds, _ in front)])
        for name, places in self._places.items():
            for changes in self._changes(made, name, _cuts(len(places)) if name in divisible else [0, len(places)]):
                limit = least[numpy.searchsorted(known, changes.peaks, side="right")]
                (new,) = numpy.nonzero(changes.seconds < limit * (1 - 1e-9))
                order = new[numpy.lexsort((changes.seconds[new], changes.peaks[new]))]
                fewest = numpy.inf
                for i in order:
                    if changes.seconds[i] < fewest:
                        fewest = changes.seconds[i]
                        other = made.copy()
                        other[places[changes.first[i] : changes.end[i]]] = changes.to[i]
                        yield *self._figures(other), other

    def _changes(self, made: Any, name: str, cuts: Sequence[int]) -> Iterator[_Changes]:
        """Yields, for each first call that changes, what all changes of a graph's calls from there on lead to.

        Args:
            cuts: places among the graph's calls where a change may begin and end, from none to all.
        """
        base, places, rows = self._base, self._places[name], numpy.array(self._rows[name])
        num = len(made)
        before = numpy.concatenate([[0], numpy.cumsum(self._held[made])])
        behind = numpy.concatenate([[0], numpy.cumsum(self._behind[made])])
        # By call, and one place for what comes after the last.
        forward = numpy.append(base.forward, -(1 << 60)), numpy.append(self._forward[made], 0)
        backward = numpy.append(base.backward, -(1 << 60)), numpy.append(self._backward[made], 0)
        between = numpy.array(base.between)
        ahead = numpy.maximum(forward[0] + forward[1], between) + before
        back = backward[0] + backward[1] + behind
        highest = numpy.maximum.accumulate(numpy.concatenate([[0], numpy.maximum(ahead, back)]))
        later_ahead = numpy.maximum.accumulate(ahead[::-1])[::-1]
        later_back = numpy.maximum.accumulate(back[::-1])[::-1]
        is_own = numpy.zeros(num + 1, dtype=bool)
        is_own[places] = True
        has = made[places][:, None] == rows[None, :]  # by call of the graph and choice
        from_first = numpy.concatenate([numpy.zeros((1, len(rows)), bool), numpy.logical_or.accumulate(has)])
        to_last = numpy.concatenate([numpy.logical_or.accumulate(has[::-1])[::-1], numpy.zeros((1, len(rows)), bool)])
        seconds = float(self._seconds[made].sum())
        own_seconds = numpy.concatenate([[0.0], numpy.cumsum(self._seconds[made[places]])])

        def moved(sizes: Any, at: int) -> Any:
            """Returns by how much levels from a call on change, by choice and call."""
            own = numpy.concatenate([[0], numpy.cumsum(numpy.where(is_own, numpy.append(sizes[made], 0), 0))[:-1]])
            count = numpy.concatenate([[0], numpy.cumsum(is_own)[:-1]])
            return sizes[rows][:, None] * (count[at:] - count[at])[None, :] - (own[at:] - own[at])[None, :]

        for first in cuts[:-1]:
            at = places[first]
            ends = numpy.array([cut for cut in cuts if cut > first])
            stops = numpy.append(places, num + 1)[ends]
            more, more_behind = moved(self._held, at), moved(self._behind, at)
            own = is_own[at:][None, :]
            inside = numpy.maximum(
                numpy.maximum(
                    forward[0][at:] + numpy.where(own, self._forward[rows][:, None], forward[1][at:]), between[at:]
                )
                + before[at:]
                + more,
                backward[0][at:]
                + numpy.where(own, self._backward[rows][:, None], backward[1][at:])
                + behind[at:]
                + more_behind,
            )
            inside = numpy.maximum.accumulate(inside, axis=1)[:, stops - 1 - at]
            after = numpy.minimum(stops, num)
            later = numpy.maximum(
                later_ahead[after] + more[:, after - at], later_back[after] + more_behind[:, after - at]
            )
            later[:, stops > num] = 0
            peaks = numpy.maximum(numpy.maximum(inside, later), highest[at])
            taken = seconds + self._seconds[rows][:, None] * (ends - first) - (own_seconds[ends] - own_seconds[first])
            others = from_first[first][None, :] | to_last[ends]
            allowed = ((others.sum(axis=1) < MOST_WAYS)[:, None] | others).T
            to, end = numpy.nonzero(allowed)
            yield _Changes(
                peaks=peaks[to, end],
                seconds=taken[to, end],
                first=numpy.full(len(to), first),
                end=ends[end],
                to=rows[to],
            )


def _cuts(num: int) -> list[int]:
    """Returns where a change among so many calls may begin and end."""
    parts = min(num, MOST_POINTS)
    return [num * i // parts for i in range(parts + 1)]


def _undominated(found: Sequence[tuple[int, float, Any]]) -> list[tuple[int, float, Any]]:
    """Returns those that no other beats in peak and seconds, by rising peak."""
    kept: list[tuple[int, float, Any]] = []
    for made in sorted(found, key=lambda f: (f[0], f[1], f[2].tobytes())):
        if not kept or made[1] < kept[-1][1]:
            kept.append(made)
    return kept


def _thinned(front: Sequence[tuple[int, float, Any]]) -> list[tuple[int, float, Any]]:
    """Returns the leanest of a front, and of those that peak nearly alike the fastest."""
    grain = max(1, round(front[-1][0] * NEGLIGIBLE_SHARE))
    return list({made[0] // grain if i else -1: made for i, made in enumerate(front)}.values())
