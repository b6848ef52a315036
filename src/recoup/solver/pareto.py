"""Fronts: the best extra seconds for every peak, of a sequence that ends where the step (or a region) ends.

A front is a falling step function: with `m` bytes above the level at its start, the sequence runs in `seconds(m)`.
Built from the end to the front, one step at a time, nothing else of the past or the future matters:

    before(m) = min over steps of  step seconds + after(m - saved)     if m >= forward and m >= backward + gradients,
    and for a region also          + inner(m - saved - replay - gradients)

with `gradients` those of everything after the step. This is Rotor's recurrence (Herrmann et al., arXiv 1911.13214,
C_BP) over exact bytes instead of memory slots, for all budgets at once. A front that outgrows its limit is thinned;
what is left stays exact, and the leanest point is always left, so the smallest reachable peak is exact. Of equal layers
nine regions in ten are dominated wherever they fit: `regions_within` bounds them all on a grid of peaks, and makes only
the points that may be left.

A search makes fronts by the ten thousand, most of a few points: so its data classes are not frozen, which would be most
of the time that they take, and what numpy does in Python (`all`, `cumsum`) is written by its C functions.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from recoup.solver.problem import Option, Region
from recoup.solver.sequence import Choice, Pick
from recoup.solver.ways import Move, Replay, Run

# Added to each step that is not plain, so that of equally fast choices the one that changes least is taken.
TIE_SECONDS = 1e-10

_MOST_BYTES = np.iinfo(np.int64).max // 2  # more than any peak, and bytes can be added

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Leaves:
    """Leaves in a row, each under one option: what they cost together, see `problem.Option`.

    Attributes:
        ways: of each, the first leaf first.
        extra_seconds: of those that are not plain, the last leaf first, so that sums are rounded as leaf by leaf.
    """

    ways: tuple[Run, ...]
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    gradient_bytes: int
    extra_seconds: tuple[float, ...]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class LeafStep:
    """Points that begin with some leaves: point i goes on with point `skip + i` of `after`."""

    ways: tuple[Run, ...]
    after: Front
    skip: int


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class RegionStep:
    """Points that begin with a region.

    One of peak p goes on with the fastest points of `after` and `inner` that fit into `p - after_bytes` and
    `p - inner_bytes`.

    Attributes:
        least_bytes: the smallest peak.
        seconds: of the region, without what goes on inside.
    """

    num_leaves: int
    rank: int
    num_calls: int
    after: Front
    after_bytes: int
    inner: Front
    inner_bytes: int
    least_bytes: int
    seconds: float
    way: Replay | Move


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Pool:
    """Points of several fronts: point i was point order[i] of them all, those of origins[k] from first[k] on."""

    origins: tuple[Origin, ...]
    first: tuple[int, ...]
    order: _Ints


Origin = LeafStep | RegionStep | Pool | None


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Front:
    """Points in order of peak, each faster than all before it.

    Attributes:
        peaks, seconds: of each point.
        gradient_bytes: of the whole sequence, the same for every point.
        origin: what the points begin with and go on in, None for the end of the sequence.
        num_thinned: how many points were dropped here for the sake of speed.
    """

    peaks: _Ints
    seconds: _Floats
    gradient_bytes: int
    origin: Origin
    num_thinned: int = 0


def empty() -> Front:
    """Returns the front of nothing: no bytes, no time."""
    return Front(peaks=np.zeros(1, dtype=np.int64), seconds=np.zeros(1), gradient_bytes=0, origin=None)


def composed(options: Sequence[tuple[Option, int]], *, ties: bool = True) -> Leaves:
    """Returns leaves in a row as one.

    Args:
        options: of each leaf, in forward order, with its gradient bytes.
        ties: whether an option that is not plain costs `TIE_SECONDS`.
    """
    saved_bytes = forward_bytes = backward_bytes = gradient_bytes = 0
    seconds = []
    for option, own_gradient_bytes in reversed(options):
        forward_bytes = max(option.forward_bytes, option.saved_bytes + forward_bytes)
        backward_bytes = max(option.backward_bytes + gradient_bytes, option.saved_bytes + backward_bytes)
        saved_bytes += option.saved_bytes
        gradient_bytes += own_gradient_bytes
        is_plain = not ties or (option.ambient == "save" and option.rung is None)
        seconds.append(option.extra_seconds + (0.0 if is_plain else TIE_SECONDS))
    return Leaves(
        ways=tuple([Run(option.ambient, option.rung) for option, _ in options]),
        saved_bytes=saved_bytes,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        gradient_bytes=gradient_bytes,
        extra_seconds=tuple(filter(None, seconds)),
    )


def before_leaves(after: Front, leaves: Leaves) -> Front:
    """Returns the front of some leaves followed by `after`."""
    floor = max(leaves.forward_bytes, leaves.backward_bytes + after.gradient_bytes)
    # Of the points that the leaves' own peaks hide, only the fastest is left.
    skip = max(int(after.peaks.searchsorted(floor - leaves.saved_bytes, side="right")) - 1, 0)
    peaks = after.peaks[skip:] + leaves.saved_bytes
    peaks[0] = max(peaks[0], floor)
    seconds = after.seconds[skip:]
    for extra in leaves.extra_seconds:
        seconds = seconds + extra
    return Front(
        peaks=peaks,
        seconds=seconds,
        gradient_bytes=after.gradient_bytes + leaves.gradient_bytes,
        origin=LeafStep(ways=leaves.ways, after=after, skip=skip),
    )


def region_step(
    after: Front,
    region: Region,
    inner: Front,
    *,
    num_leaves: int,
    rank: int,
    num_calls: int,
    way: Replay | Move,
) -> RegionStep:
    """Returns the step that is a region, whose inside has the front `inner`, followed by `after`."""
    inner_bytes = region.saved_bytes + region.replay_bytes + after.gradient_bytes
    return RegionStep(
        num_leaves=num_leaves,
        rank=rank,
        num_calls=num_calls,
        after=after,
        after_bytes=region.saved_bytes,
        inner=inner,
        inner_bytes=inner_bytes,
        least_bytes=max(
            after.peaks.item(0) + region.saved_bytes, inner.peaks.item(0) + inner_bytes, region.forward_bytes
        ),
        seconds=region.seconds + TIE_SECONDS,
        way=way,
    )


def before_region(step: RegionStep, above_bytes: int = -1, most_bytes: int = _MOST_BYTES) -> Front:
    """Returns the front of a region and what follows: its points of peaks above `above_bytes`, up to `most_bytes`."""
    after, inner, least = step.after, step.inner, step.least_bytes
    outer_peaks = after.peaks + step.after_bytes
    inner_peaks = inner.peaks + step.inner_bytes
    ends = (max(least, above_bytes), most_bytes)
    outer_first, outer_last = outer_peaks.searchsorted(ends, side="right").tolist()
    inner_first, inner_last = inner_peaks.searchsorted(ends, side="right").tolist()
    begin = np.array([least] if least > above_bytes else [], dtype=np.int64)
    peaks = np.concatenate((begin, outer_peaks[outer_first:outer_last], inner_peaks[inner_first:inner_last]))
    if inner_peaks[-1] <= least:  # the rest sets every peak
        seconds = after.seconds[outer_first - len(begin) : outer_last] + (float(inner.seconds[-1]) + step.seconds)
    elif outer_peaks[-1] <= least:
        seconds = inner.seconds[inner_first - len(begin) : inner_last] + (float(after.seconds[-1]) + step.seconds)
    else:
        peaks.sort(kind="stable")  # two sorted runs: merged in linear time
        seconds = _seconds_at(after, peaks - step.after_bytes) + _seconds_at(inner, peaks - step.inner_bytes)
        seconds += step.seconds
    gradient_bytes = after.gradient_bytes + inner.gradient_bytes
    return Front(peaks=peaks, seconds=seconds, gradient_bytes=gradient_bytes, origin=step)


def regions_within(steps: Sequence[RegionStep], rival: Front) -> list[Front]:
    """Returns the fronts of regions, without most of the points that other regions or `rival` dominate.

    Branch and bound over a grid of peaks: between two of them a front is nowhere faster than at the larger, so it is
    dominated there if any other is faster at the smaller one already.
    """
    rival_peaks = rival.peaks.tolist()
    steps = [step for step in steps if not _is_dominated(step, rival, rival_peaks)]
    if len(steps) <= 3:  # made as fast as they are compared
        return [before_region(step) for step in steps]
    samples = [_sample(step.after.peaks) + step.after_bytes for step in (steps[0], steps[-1])]
    grid = np.concatenate([_sample(rival.peaks), *samples, [_MOST_BYTES]])
    if sum([len(step.after.peaks) + len(step.inner.peaks) for step in steps]) <= 4 * len(grid) * len(steps):
        return [before_region(step) for step in steps]  # so are few points
    grid.sort()
    seconds = np.empty((len(steps) + 1, len(grid)))
    for row, step in zip(seconds, steps, strict=False):
        row[:] = _seconds_at(step.after, grid - step.after_bytes)
        row += _seconds_at(step.inner, grid - step.inner_bytes)
        row += step.seconds
    seconds[-1] = _seconds_at(rival, grid)
    least = np.array([step.least_bytes for step in steps] + [rival.peaks.item(0)])
    seconds[grid < least[:, None]] = np.inf
    best = seconds.min(axis=0)
    may = seconds[:-1] < np.inf
    may[:, 1:] &= seconds[:-1, 1:] <= best[:-1] + TIE_SECONDS
    first = may.argmax(axis=1).tolist()
    last = (len(grid) - may[:, ::-1].argmax(axis=1)).tolist()
    edges = [-1, *grid.tolist()]
    return [before_region(steps[i], edges[first[i]], edges[last[i]]) for i in np.flatnonzero(may.any(axis=1)).tolist()]


def _sample(peaks: _Ints) -> _Ints:
    """Returns about the square root of a front's peaks, evenly spaced."""
    return peaks[:: math.isqrt(len(peaks))]


def _seconds_at(front: Front, nbytes: _Ints) -> _Floats:
    """Returns the fastest seconds within some bytes each, at least those of the leanest point."""
    return front.seconds[front.peaks.searchsorted(nbytes, side="right") - 1]


def _is_dominated(step: RegionStep, rival: Front, rival_peaks: list[int]) -> bool:
    """Whether one point of `rival` is as fast as the fastest point of a region, within the bytes of its leanest."""
    point = bisect.bisect_right(rival_peaks, step.least_bytes) - 1
    fastest = step.after.seconds.item(-1) + step.inner.seconds.item(-1) + step.seconds
    return point >= 0 and rival.seconds.item(point) <= fastest


def best_of(fronts: Sequence[Front], max_points: int) -> Front:
    """Returns the front of all points of `fronts` that none dominates, thinned to about `max_points`."""
    if len(fronts) == 1 and len(fronts[0].peaks) <= max_points:
        return fronts[0]
    # Each front is sorted: a stable sort merges such runs in linear time.
    peaks = np.concatenate([f.peaks for f in fronts])
    order = peaks.argsort(kind="stable")
    seconds = np.concatenate([f.seconds for f in fronts])[order]
    best = np.minimum.accumulate(seconds)
    keep = np.empty(len(best), dtype=bool)
    keep[0] = True
    np.less(best[1:], best[:-1], out=keep[1:])
    order = order[keep]
    peaks = peaks[order]
    seconds = seconds[keep]
    is_last = np.empty(len(peaks), dtype=bool)  # of those with one peak: the fastest
    is_last[-1] = True
    np.not_equal(peaks[1:], peaks[:-1], out=is_last[:-1])
    num_thinned = 0
    if np.count_nonzero(is_last) < len(is_last):
        order, peaks, seconds = order[is_last], peaks[is_last], seconds[is_last]
    if len(peaks) > max_points:
        left = _spread(seconds, max_points)
        num_thinned = len(peaks) - len(left)
        order, seconds, peaks = order[left], seconds[left], peaks[left]
    return Front(
        peaks=peaks,
        seconds=seconds,
        gradient_bytes=fronts[0].gradient_bytes,
        origin=Pool(
            origins=tuple([f.origin for f in fronts]),
            first=tuple(itertools.accumulate([len(f.peaks) for f in fronts], initial=0)),
            order=order,
        ),
        num_thinned=num_thinned,
    )


def _spread(seconds: _Floats, max_points: int) -> _Ints:
    """Returns about `max_points` indices, so that what is left is slower by about the same *share* everywhere.

    Of each bucket of the logarithm of seconds the leanest point is left, and the fastest of all. Below a ten
    thousandth of the largest seconds the error is that share of it instead.
    """
    along = np.log(seconds + (float(seconds[0]) * 1e-4 + 1e-300))
    along -= along[-1]
    bucket = (along * (max_points / max(float(along[0]), 1e-300))).astype(np.int64)
    first = np.empty(len(bucket), dtype=bool)
    first[0] = first[-1] = True
    np.not_equal(bucket[1:-1], bucket[:-2], out=first[1:-1])
    return np.flatnonzero(first)


def choice_at(front: Front, point: int) -> Choice:
    """Returns the choice behind a point of a front."""
    picks: list[Pick] = []
    at = 0
    while front.origin is not None:
        peak = int(front.peaks[point])
        origin: Origin = front.origin
        while isinstance(origin, Pool):
            point = int(origin.order[point])
            which = bisect.bisect_right(origin.first, point) - 1
            point -= origin.first[which]
            origin = origin.origins[which]
        if isinstance(origin, LeafStep):
            picks += [Pick(first=i, last=i + 1, way=way) for i, way in enumerate(origin.ways, start=at)]
            at += len(origin.ways)
            point += origin.skip
        else:
            assert origin is not None, "only the end of a sequence has no origin"
            inner_point = int(origin.inner.peaks.searchsorted(peak - origin.inner_bytes, side="right")) - 1
            point = int(origin.after.peaks.searchsorted(peak - origin.after_bytes, side="right")) - 1
            picks.append(
                Pick(
                    first=at,
                    last=at + origin.num_leaves,
                    way=origin.way,
                    inner=choice_at(origin.inner, inner_point),
                    rank=origin.rank,
                    num_calls=origin.num_calls,
                )
            )
            at += origin.num_leaves
        front = origin.after
    return tuple(picks)
