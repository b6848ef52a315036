"""Fronts: the best extra seconds for every peak, of a sequence that ends where the step (or a region) ends.

A front is a falling step function: with `m` bytes above the level at its start, the sequence runs in `seconds(m)`.
Built from the end to the front, one step at a time, nothing else of the past or the future matters:

    before(m) = min over steps of  step seconds + after(m - saved)     if m >= forward and m >= backward + gradients,
    and for a region also          + inner(m - saved - replay - gradients)

with `gradients` those of everything after the step. This is Rotor's recurrence (Herrmann et al., arXiv 1911.13214,
C_BP) over exact bytes instead of memory slots, for all budgets at once. A front that outgrows its limit is thinned;
what is left stays exact, and the leanest point is always left, so the smallest reachable peak is exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from recoup.solve.problem import Option, Region
from recoup.solve.sequence import Choice, Pick

# Added to each step that is not plain, so that of equally fast choices the one that changes least is taken.
TIE_SECONDS = 1e-10

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """What a point of a front begins with, and the fronts it goes on in."""

    num_leaves: int
    action: str
    rank: int = 0
    num_calls: int = 0
    after: Front | None = None
    inner: Front | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Front:
    """Points in order of peak, each faster than all before it.

    Attributes:
        peaks, seconds: of each point. gradient_bytes: of the whole sequence, the same for every point.
        steps: what points begin with; step[i], after[i], inner[i] say which step point i begins with and which
            points of the step's `after` and `inner` fronts it goes on with.
        num_thinned: how many points were dropped here for the sake of speed.
    """

    peaks: _Ints
    seconds: _Floats
    gradient_bytes: int
    steps: tuple[Step, ...]
    step: _Ints
    after: _Ints
    inner: _Ints
    num_thinned: int = 0


def empty() -> Front:
    """Returns the front of nothing: no bytes, no time."""
    zero = np.zeros(1, dtype=np.int64)
    return Front(peaks=zero, seconds=np.zeros(1), gradient_bytes=0, steps=(), step=zero, after=zero, inner=zero)


def before_leaf(after: Front, option: Option, gradient_bytes: int, *, is_plain: bool) -> Front:
    """Returns the front of a leaf under one option, followed by `after`."""
    floor = max(option.forward_bytes, option.backward_bytes + after.gradient_bytes)
    # Of the points that the leaf's own peak hides, only the fastest is left.
    skip = max(int(after.peaks.searchsorted(floor - option.saved_bytes, side="right")) - 1, 0)
    peaks = after.peaks[skip:] + option.saved_bytes
    if peaks[0] < floor:
        peaks[0] = floor
    index = np.arange(skip, skip + len(peaks))
    zero = np.zeros(len(peaks), dtype=np.int64)
    return Front(
        peaks=peaks,
        seconds=after.seconds[skip:] + (option.extra_seconds + (0.0 if is_plain else TIE_SECONDS)),
        gradient_bytes=after.gradient_bytes + gradient_bytes,
        steps=(Step(num_leaves=1, action=option.action, after=after),),
        step=zero,
        after=index,
        inner=zero,
    )


def before_region(after: Front, region: Region, inner: Front, *, num_leaves: int, rank: int, num_calls: int) -> Front:
    """Returns the front of a region, whose inside has the front `inner`, followed by `after`."""
    outer_peaks = after.peaks + region.saved_bytes
    inner_peaks = inner.peaks + (region.saved_bytes + region.replay_bytes + after.gradient_bytes)
    start = max(int(outer_peaks[0]), int(inner_peaks[0]), region.forward_bytes)
    outer_first = int(outer_peaks.searchsorted(start, side="right"))
    inner_first = int(inner_peaks.searchsorted(start, side="right"))
    peaks = np.concatenate(([start], outer_peaks[outer_first:], inner_peaks[inner_first:]))
    if inner_first < len(inner_peaks) and outer_first < len(outer_peaks):
        peaks.sort(kind="stable")  # two sorted runs: merged in linear time
    after_index = outer_peaks.searchsorted(peaks, side="right") - 1
    inner_index = inner_peaks.searchsorted(peaks, side="right") - 1
    seconds = after.seconds[after_index] + inner.seconds[inner_index] + (region.seconds + TIE_SECONDS)
    return Front(
        peaks=peaks,
        seconds=seconds,
        gradient_bytes=after.gradient_bytes + inner.gradient_bytes,
        steps=(
            Step(num_leaves=num_leaves, action="recompute", rank=rank, num_calls=num_calls, after=after, inner=inner),
        ),
        step=np.zeros(len(peaks), dtype=np.int64),
        after=after_index,
        inner=inner_index,
    )


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
    if not is_last.all():
        order, peaks, seconds = order[is_last], peaks[is_last], seconds[is_last]
    if len(peaks) > max_points:
        left = _spread(seconds, max_points)
        num_thinned = len(peaks) - len(left)
        order, seconds, peaks = order[left], seconds[left], peaks[left]
    offsets = np.cumsum([0] + [len(f.steps) for f in fronts])
    return Front(
        peaks=peaks,
        seconds=seconds,
        gradient_bytes=fronts[0].gradient_bytes,
        steps=tuple(step for f in fronts for step in f.steps),
        step=np.concatenate([f.step + offset for f, offset in zip(fronts, offsets, strict=False)])[order],
        after=np.concatenate([f.after for f in fronts])[order],
        inner=np.concatenate([f.inner for f in fronts])[order],
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
    current: Front = front
    while current.steps:
        step = current.steps[int(current.step[point])]
        inner: Choice = ()
        if step.inner is not None:
            inner = choice_at(step.inner, int(current.inner[point]))
        picks.append(
            Pick(
                first=at,
                last=at + step.num_leaves,
                action=step.action,
                inner=inner,
                rank=step.rank,
                num_calls=step.num_calls,
            )
        )
        at += step.num_leaves
        point = int(current.after[point])
        assert step.after is not None
        current = step.after
    return tuple(picks)
