"""Checkpointing by hand: nothing, every repeated block, every k-th, sqrt(n) segments.

They are choices like any other, priced by the same rules, so that the solver can be held against them. "The repeated
blocks" are the siblings of one class that together save the most: a transformer's layers, a ResNet's stages.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from recoup.solver.problem import Leaf, Problem
from recoup.solver.reference import evaluate_line, option_of, uniform
from recoup.solver.sequence import Call, Choice, Line, Pick, region_of
from recoup.solver.ways import Replay, Run

Segments = Sequence[Sequence[Call]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A choice with the name people know it by.

    Attributes:
        name: "none", "full", "every-2", ..., "sqrt".
        peak_bytes, extra_seconds, extra_flops: as `reference.evaluate` says.
        has_spans: whether a region covers several calls.
    """

    name: str
    choice: Choice
    peak_bytes: int
    extra_seconds: float
    extra_flops: int
    has_spans: bool = False


def baselines(problem: Problem) -> tuple[Baseline, ...]:
    """Returns the baselines that the problem allows, "none" first.

    "every-k" makes every k-th repeated block a region, beginning with the first. "sqrt" (Chen et al., arXiv
    1604.06174) makes segments of about sqrt(n) chained blocks regions, all but the last segment, which is replayed
    right away and would gain nothing.
    """
    line = Line(problem)
    found = []
    for name, segments in named_segments(line):
        choice = choice_of(line, segments)
        peak_bytes, extra_seconds, extra_flops = evaluate_line(line, choice)
        found.append(
            Baseline(
                name=name,
                choice=choice,
                peak_bytes=peak_bytes,
                extra_seconds=extra_seconds,
                extra_flops=extra_flops,
                has_spans=any(len(segment) > 1 for segment in segments),
            )
        )
    return tuple(found)


def named_segments(line: Line) -> Iterator[tuple[str, Segments]]:
    """Yields the name of each baseline, and the calls of each of its regions."""
    yield "none", ()
    blocks = repeated_blocks(line)
    if not blocks:
        return
    named: list[tuple[str, list[tuple[Call, ...]]]] = [("full", [(block,) for block in blocks])]
    named += [(f"every-{k}", [(block,) for block in blocks[::k]]) for k in _strides(len(blocks))]
    length = math.isqrt(len(blocks) - 1) + 1
    if length > 1 and all(a.following is b for a, b in itertools.pairwise(blocks)):
        named.append(("sqrt", [tuple(blocks[i : i + length]) for i in range(0, len(blocks), length)][:-1]))
    for name, segments in named:
        allowed = [segment for segment in segments if region_of(segment).is_alone]
        if allowed:
            yield name, allowed


class Pricer:
    """Prices many sets of regions over one line, plain outside and inside them, without writing out their choices."""

    def __init__(self, line: Line) -> None:
        self._line = line
        options = [option_of(leaf, Run("save")) for leaf in line.leaves]
        saved = np.array([o.saved_bytes for o in options], dtype=np.int64)
        self._levels = np.concatenate([[0], np.cumsum(saved)])
        self._gradients = np.array(line.gradient_sums, dtype=np.int64)
        # Peaks of a plain step from the first leaf on, before the gradients of what comes later.
        self._forward = self._levels[:-1] + np.array([max(o.forward_bytes, o.saved_bytes) for o in options])
        self._backward = self._levels[:-1] + np.array([o.backward_bytes for o in options]) - self._gradients[1:]

    def price(self, segments: Segments) -> tuple[int, float]:
        """Returns (peak bytes of the step, extra seconds): what `evaluate` says of `choice_of(line, segments)`."""
        line = self._line
        label = _Label(0, 0, 0, 0)
        at, seconds = 0, 0.0
        for segment in segments:
            first, last = segment[0].first, segment[-1].last
            inner = self._stretch(first, last)
            region = region_of(tuple(segment))
            seconds += region.seconds
            saved = region.saved_bytes
            replayed = saved + region.replay_bytes + max(inner.forward_bytes, inner.backward_bytes)
            label = _then(label, self._stretch(at, first))
            label = _then(label, _Label(saved, max(region.forward_bytes, saved), replayed, inner.gradient_bytes))
            at = last
        label = _then(label, self._stretch(at, len(line.leaves)))
        peak = line.problem.fixed_bytes + max(label.forward_bytes, label.backward_bytes)
        return max(peak, line.problem.optimizer_peak_bytes), seconds

    def _stretch(self, first: int, last: int) -> _Label:
        """Returns the label of leaves [first, last), all plain."""
        if first == last:
            return _Label(0, 0, 0, 0)
        level = int(self._levels[first])
        return _Label(
            int(self._levels[last]) - level,
            int(self._forward[first:last].max()) - level,
            int(self._backward[first:last].max()) - level + int(self._gradients[last]),
            int(self._gradients[last] - self._gradients[first]),
        )


class _Label(NamedTuple):
    """The prices of a sequence of leaves: bytes saved, peaks above the level before it, bytes of gradients."""

    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    gradient_bytes: int


def _then(a: _Label, b: _Label) -> _Label:
    """Returns the label of `a` followed by `b`."""
    return _Label(
        a.saved_bytes + b.saved_bytes,
        max(a.forward_bytes, a.saved_bytes + b.forward_bytes),
        max(a.saved_bytes + b.backward_bytes, a.backward_bytes + b.gradient_bytes),
        a.gradient_bytes + b.gradient_bytes,
    )


def repeated_blocks(line: Line) -> list[Call]:
    """Returns the siblings of one class that together save the most; without such, the children of the call that
    saves the most in them."""
    saved = [0]
    for leaf in line.leaves:
        saved.append(saved[-1] + option_of(leaf, Run("save")).saved_bytes)
    best: tuple[tuple[bool, int], list[Call]] = ((False, -1), [])
    for siblings in _sibling_lists(line):
        by_kind: dict[str, list[Call]] = {}
        for call in siblings:
            by_kind.setdefault(call.block.kind, []).append(call)
        groups = [(len(group) > 1, group) for group in by_kind.values()]
        for is_repeated, group in [*groups, (False, siblings)]:
            rank = (is_repeated, sum(saved[c.last] - saved[c.first] for c in group))
            if rank > best[0]:
                best = (rank, group)
    return best[1]


def _sibling_lists(line: Line) -> Iterator[list[Call]]:
    pending: list[tuple[Leaf | Call, ...]] = [line.root.parts]
    while pending:
        calls = [part for part in pending.pop() if isinstance(part, Call)]
        able = [call for call in calls if call.block.region is not None]
        if able:
            yield able
        pending += [call.parts for call in calls]


def _strides(num_blocks: int) -> list[int]:
    """Returns the values of k for every-k: all below n // 2, where two regions are left, and a few above."""
    return [k for k in range(2, num_blocks + 1) if k <= 64 or k % (k // 16) == 0]


def choice_of(line: Line, segments: Segments) -> Choice:
    """Returns the choice with one region for each segment, plain outside and inside."""
    picks: list[Pick] = []
    at = 0
    for segment in segments:
        first, last = segment[0].first, segment[-1].last
        picks += _plain(line, at, first)
        picks.append(
            Pick(
                first=first,
                last=last,
                way=Replay(),
                inner=uniform(line, first, last, "save"),
                rank=segment[0].rank,
                num_calls=len(segment),
            )
        )
        at = last
    picks += _plain(line, at, len(line.leaves))
    return tuple(picks)


def _plain(line: Line, first: int, last: int) -> Iterator[Pick]:
    for i in range(first, last):
        option = option_of(line.leaves[i], Run("save"))
        yield Pick(first=i, last=i + 1, way=Run(option.ambient, option.rung))
