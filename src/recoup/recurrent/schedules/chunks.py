"""Chunks: the loop is cut into chunks of equal length; each chunk is taped as a whole when its backward is due.

Chen et al. 2016 (arXiv 1604.06174), there for layers. With chunks of c steps it holds T/c states and c tapes. The last
chunk is taped in the first forward, so that at most `2 T - c` steps are evaluated. c = sqrt(T) minimises memory where
a tape is as large as a state; c = sqrt(T / a) where it is `a` times as large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from recoup.recurrent.schedules.actions import Action, Schedule


def default_chunk(num_steps: int) -> int:
    """Returns the default chunk size in steps: sqrt(T), rounded."""
    return max(1, round(math.sqrt(num_steps)))


def chunk_schedule(num_steps: int, chunk: int) -> Schedule:
    """Returns the schedule with chunks of `chunk` steps, the last one possibly shorter."""
    starts = range(0, num_steps, chunk)
    return Schedule(
        name=f"chunks of {chunk}",
        num_steps=num_steps,
        evaluations=num_steps + starts[-1],
        actions=lambda: _actions(num_steps, chunk),
    )


def _actions(num_steps: int, chunk: int) -> Iterator[Action]:
    starts = range(0, num_steps, chunk)
    for start in starts[:-1]:
        if start:
            yield Action("save", start, start)
        yield Action("advance", start, start + chunk)
    last = starts[-1]
    for start in reversed(starts):
        stop = min(start + chunk, num_steps)
        if start != last:
            yield Action("load", start, start)
        yield Action("tape", start, stop)
        if 0 < start < last:
            yield Action("free", start, start)
        yield Action("backward", start, stop)
