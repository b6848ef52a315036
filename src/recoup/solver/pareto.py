"""Fronts: the best extra seconds for every peak, of a sequence that ends where the step (or a region) ends.

A front is a falling step function: with `m` bytes above the level at its start, the sequence runs in `seconds(m)`.
Built from the end to the front, one step at a time, nothing else of the past or the future matters:

    before(m) = min over steps of  step seconds + after(m - saved)     if m >= forward and m >= backward + gradients,
    and for a region also          + inner(m - saved - replay - gradients)

with `gradients` those of everything after the step. This is Rotor's recurrence (Herrmann et al., arXiv 1911.13214,
C_BP) over exact bytes instead of memory slots, for all budgets at once. A front that outgrows its limit is thinned;
what is left stays exact, and the leanest point is always left, so the smallest reachable peak is exact.

A search makes fronts by the ten thousand, most of a few points: so its data classes are not frozen, which would be most
of the time that they take, and what numpy does in Python (`all`, `cumsum`) is written by its C functions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from recoup.solver.problem import Option, Region
from recoup.solver.sequence import Choice, Pick
from recoup.solver.ways import Move, Replay, Run

# Added to each step that is not plain, so that of equally fast choices the one that changes least is taken.
TIE_SECONDS = 1e-10

_REGION = Replay()

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class LeafStep:
    """Points that begin with a leaf: point i goes on with point `skip + i` of `after`."""

    way: Run
    after: Front
    skip: int


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class RegionStep:
    """Points that begin with a region.

    One of peak p goes on with the fastest points of `after` and `inner` that fit into `p - after_bytes` and
    `p - inner_bytes`.
    """

    num_leaves: int
    rank: int
    num_calls: int
    after: Front
    after_bytes: int
    inner: Front
    inner_bytes: int
    way: Replay | Move


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Pool:
    """Points of several fronts: point i was point index[i] of the front with origin origins[which[i]]."""

    origins: tuple[Origin, ...]
    which: _Ints
    index: _Ints


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


def before_leaf(after: Front, option: Option, gradient_bytes: int, *, is_plain: bool) -> Front:
    """Returns the front of a leaf under one option, followed by `after`."""
    floor = max(option.forward_bytes, option.backward_bytes + after.gradient_bytes)
    # Of the points that the leaf's own peak hides, only the fastest is left.
    skip = max(int(after.peaks.searchsorted(floor - option.saved_bytes, side="right")) - 1, 0)
    peaks = after.peaks[skip:] + option.saved_bytes
    peaks[0] = max(peaks[0], floor)
    extra = option.extra_seconds + (0.0 if is_plain else TIE_SECONDS)
    seconds = after.seconds[skip:]
    if extra:
        seconds = seconds + extra
    return Front(
        peaks=peaks,
        seconds=seconds,
        gradient_bytes=after.gradient_bytes + gradient_bytes,
        origin=LeafStep(way=Run(option.ambient, option.rung), after=after, skip=skip),
    )


def before_region(
    after: Front,
    region: Region,
    inner: Front,
    *,
    num_leaves: int,
    rank: int,
    num_calls: int,
    way: Replay | Move = _REGION,
) -> Front:
    """Returns the front of a region, whose inside has the front `inner`, followed by `after`."""
    inner_bytes = region.saved_bytes + region.replay_bytes + after.gradient_bytes
    outer_peaks = after.peaks + region.saved_bytes
    inner_peaks = inner.peaks + inner_bytes
    start = max(int(outer_peaks[0]), int(inner_peaks[0]), region.forward_bytes)
    outer_first = int(outer_peaks.searchsorted(start, side="right"))
    inner_first = int(inner_peaks.searchsorted(start, side="right"))
    peaks = np.concatenate(([start], outer_peaks[outer_first:], inner_peaks[inner_first:]))
    extra = region.seconds + TIE_SECONDS
    if inner_first == len(inner_peaks):  # the rest sets every peak
        seconds = after.seconds[outer_first - 1 :] + (float(inner.seconds[-1]) + extra)
    elif outer_first == len(outer_peaks):
        seconds = inner.seconds[inner_first - 1 :] + (float(after.seconds[-1]) + extra)
    else:
        peaks.sort(kind="stable")  # two sorted runs: merged in linear time
        seconds = after.seconds[outer_peaks.searchsorted(peaks, side="right") - 1]
        seconds = seconds + inner.seconds[inner_peaks.searchsorted(peaks, side="right") - 1] + extra
    return Front(
        peaks=peaks,
        seconds=seconds,
        gradient_bytes=after.gradient_bytes + inner.gradient_bytes,
        origin=RegionStep(
            num_leaves=num_leaves,
            rank=rank,
            num_calls=num_calls,
            after=after,
            after_bytes=region.saved_bytes,
            inner=inner,
            inner_bytes=inner_bytes,
            way=way,
        ),
    )


def is_dominated(after: Front, region: Region, inner: Front, rival: Front) -> bool:
    """Whether one point of `rival` is as fast as the fastest point of a region, within the bytes of its leanest.

    Then `best_of` takes no point of `before_region(after, region, inner)`, and it need not be made.
    """
    least = max(
        after.peaks.item(0) + region.saved_bytes,
        inner.peaks.item(0) + region.saved_bytes + region.replay_bytes + after.gradient_bytes,
        region.forward_bytes,
    )
    point = int(rival.peaks.searchsorted(least, side="right")) - 1
    fastest = after.seconds.item(-1) + inner.seconds.item(-1) + region.seconds + TIE_SECONDS
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
    offsets = np.array([0, *itertools.accumulate(len(f.peaks) for f in fronts)])
    which = offsets.searchsorted(order, side="right") - 1
    return Front(
        peaks=peaks,
        seconds=seconds,
        gradient_bytes=fronts[0].gradient_bytes,
        origin=Pool(origins=tuple(f.origin for f in fronts), which=which, index=order - offsets[which]),
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
            which = int(origin.which[point])
            point = int(origin.index[point])
            origin = origin.origins[which]
        if isinstance(origin, LeafStep):
            picks.append(Pick(first=at, last=at + 1, way=origin.way))
            at += 1
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
