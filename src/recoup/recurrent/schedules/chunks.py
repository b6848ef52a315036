"""Chunks: the loop is cut into pieces of equal length; each piece is taped as a whole when its backward comes.

Chen et al. 2016 (arXiv 1604.06174), there for layers. With chunks of c steps it holds T/c states and c tapes; the last
chunk is taped at once, so it evaluates `2 T - c` steps or a little less. c near sqrt(T) makes the sum smallest when a
tape takes about what a state takes; if a tape takes `a` states, c near sqrt(T / a) does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from recoup.recurrent.schedules.actions import Action, Schedule


def default_chunk(num_steps: int) -> int:
    """Returns the chunk size where nothing is asked for: sqrt(T), rounded."""
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
