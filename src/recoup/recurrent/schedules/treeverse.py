"""Treeverse: the fewest step evaluations with a fixed number of states and one taped step at a time.

Griewank 1992 (treeverse) and Griewank & Walther 2000 (revolve, ACM TOMS algorithm 799), who prove it optimal. With
`s` slots, the start state's counted, and `r` the smallest number with `C(s + r, s) >= T`, the steps evaluated besides
the T taped ones are `r T - C(s + r, r - 1)`; no step is evaluated more than `r + 1` times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from recoup.recurrent.schedules.actions import Action, Schedule


def treeverse_evaluations(num_steps: int, slots: int) -> int:
    """Returns the minimal number of step evaluations, taped ones included, with `slots` states, the start counted."""
    return num_steps + _plain_evaluations(num_steps, min(slots, num_steps))


def treeverse_schedule(num_steps: int, slots: int) -> Schedule:
    """Returns the optimal schedule for `slots` states, the start state's slot counted."""
    slots = min(slots, num_steps)
    return Schedule(
        name=f"treeverse with {slots} slots",
        num_steps=num_steps,
        evaluations=treeverse_evaluations(num_steps, slots),
        actions=lambda: _actions(num_steps, slots),
    )


@functools.lru_cache(maxsize=1 << 16)
def _plain_evaluations(n: int, s: int) -> int:
    if n <= 1:
        return 0
    if s == 1:
        return n * (n - 1) // 2
    r = _repetitions(n, s)
    return r * n - math.comb(s + r, r - 1)


def _repetitions(n: int, s: int) -> int:
    r = 1
    while math.comb(s + r, s) < n:
        r += 1
    return r


@functools.lru_cache(maxsize=1 << 16)
def _split(n: int, s: int) -> int:
    """Returns how far to advance before the next state is saved: both parts stay within r repetitions.

    The left part has one repetition less, the right part one slot less: any length between these bounds is optimal
    (Griewank & Walther 2000). The longest is taken, since the right part holds more states.
    """
    r = _repetitions(n, s)
    return min(math.comb(s + r - 1, s), n - math.comb(s + r - 2, s - 1), n - 1)


def _actions(num_steps: int, slots: int) -> Iterator[Action]:
    current = 0
    # A stack of parts to do: (first step, end, slots), or (state, -1, 0) to free a state.
    todo = [(0, num_steps, slots)]
    while todo:
        start, end, s = todo.pop()
        if end < 0:
            yield Action("free", start, start)
            continue
        if current != start:
            yield Action("load", start, start)
        if s == 1 or end - start == 1:
            for step in range(end - 1, start - 1, -1):
                if step != end - 1:
                    yield Action("load", start, start)
                if step > start:
                    yield Action("advance", start, step)
                yield Action("tape", step, step + 1)
                yield Action("backward", step, step + 1)
            current = -1
            continue
        middle = start + _split(end - start, s)
        yield Action("advance", start, middle)
        yield Action("save", middle, middle)
        current = middle
        todo += [(start, middle, s), (middle, -1, 0), (middle, end, s - 1)]
