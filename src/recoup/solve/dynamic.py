"""The fastest choice under a limit: a walk over the line that keeps a front of (bytes saved so far, extra seconds).

For a fixed limit nothing else of the past matters: gradients that come later are the same for every choice, so a
move is allowed from exactly those points whose saved bytes leave room for its forward and for its backward. This is
Rotor's dynamic programme (Herrmann et al., arXiv 1911.13214) with more kinds of moves and exact bytes in place of a
grid. Where a front outgrows `MAX_FRONT` it is thinned over bytes; its ends and exact values stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recoup.solve.sequence import Line, Pick

MAX_FRONT = 1500
REGION_TIE_SECONDS = 1e-9


class Move(NamedTuple):
    """One way from `first` to `last`, relative to the walk's start; prices as in `problem.Option`."""

    first: int
    last: int
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    seconds: float
    pick: Pick


class _Front(NamedTuple):
    saved: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    move: npt.NDArray[np.int64]
    parent: npt.NDArray[np.int64]


def fastest(
    line: Line, moves: Sequence[Move], *, first: int, last: int, limit_bytes: int, max_front: int = MAX_FRONT
) -> tuple[Pick, ...] | None:
    """Returns the fastest choice over leaves [first, last) whose peak is at most `limit_bytes`, None if none is.

    Args:
        moves: every move inside, relative to `first`, in order of where they begin.
    """
    length = last - first
    sums = line.gradient_sums
    incoming: list[list[tuple[int, Move, npt.NDArray[np.int64], npt.NDArray[np.float64], int]]] = [
        [] for _ in range(length + 1)
    ]
    fronts: list[_Front | None] = [None] * (length + 1)
    zero = np.zeros(1, dtype=np.int64)
    fronts[0] = _Front(zero, np.zeros(1), zero - 1, zero - 1)
    position = 0
    for number, move in enumerate(moves):
        while position < move.first:
            position += 1
            fronts[position] = _merge(incoming[position], max_front)
        front = fronts[move.first]
        if front is None:
            continue
        after = int(sums[last] - sums[first + move.last])
        room = limit_bytes - max(move.forward_bytes, move.backward_bytes + after)
        count = int(np.searchsorted(front.saved, room, side="right"))
        if count:
            saved = front.saved[:count] + move.saved_bytes
            seconds = front.seconds[:count] + move.seconds
            incoming[move.last].append((number, move, saved, seconds, count))
    while position < length:
        position += 1
        fronts[position] = _merge(incoming[position], max_front)
    final = fronts[length]
    if final is None:
        return None
    index = int(np.argmin(final.seconds))
    picks: list[Pick] = []
    at = length
    while at > 0:
        front = fronts[at]
        assert front is not None
        move = moves[int(front.move[index])]
        index = int(front.parent[index])
        picks.append(move.pick)
        at = move.first
    return tuple(reversed(picks))


def _merge(
    arrivals: list[tuple[int, Move, npt.NDArray[np.int64], npt.NDArray[np.float64], int]], max_front: int
) -> _Front | None:
    if not arrivals:
        return None
    if len(arrivals) == 1:
        number, _, saved, seconds, count = arrivals[0]
        return _Front(saved, seconds, np.full(count, number, dtype=np.int64), np.arange(count, dtype=np.int64))
    saved = np.concatenate([a[2] for a in arrivals])
    seconds = np.concatenate([a[3] for a in arrivals])
    move = np.concatenate([np.full(a[4], a[0], dtype=np.int64) for a in arrivals])
    parent = np.concatenate([np.arange(a[4], dtype=np.int64) for a in arrivals])
    order = np.lexsort((seconds, saved))
    saved, seconds = saved[order], seconds[order]
    best = np.minimum.accumulate(seconds)
    keep = np.empty(len(saved), dtype=bool)
    keep[0] = True
    keep[1:] = best[1:] < best[:-1]
    chosen = np.flatnonzero(keep)
    if len(chosen) > max_front:
        span = saved[chosen]
        bucket = (span - span[0]) * max_front // max(int(span[-1] - span[0]), 1)
        # The fastest of a bucket is its last; the leanest point of all stays too.
        last = np.append(np.flatnonzero(np.diff(bucket)), len(chosen) - 1)
        chosen = chosen[np.unique(np.append(last, 0))]
    order = order[chosen]
    return _Front(saved[chosen], seconds[chosen], move[order], parent[order])


def leanest(line: Line, moves: Sequence[Move], *, first: int, last: int, limit_bytes: int) -> bool:
    """Returns whether any choice over leaves [first, last) peaks at most at `limit_bytes`.

    Only the smallest saved bytes at each position matter for that.
    """
    length = last - first
    sums = line.gradient_sums
    smallest: list[int | None] = [None] * (length + 1)
    smallest[0] = 0
    for move in moves:
        level = smallest[move.first]
        if level is None:
            continue
        after = int(sums[last] - sums[first + move.last])
        if level + max(move.forward_bytes, move.backward_bytes + after) <= limit_bytes:
            reached = smallest[move.last]
            saved = level + move.saved_bytes
            if reached is None or saved < reached:
                smallest[move.last] = saved
    return smallest[length] is not None
