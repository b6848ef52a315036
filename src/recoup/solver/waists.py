"""Narrow waists of a forward pass: places between ops which few live bytes cross, where segments are cut.

What crosses the boundary of a segment is held or handed on, so a good boundary is one that few bytes cross. How far a
place has to be the narrowest is no number of ops: as far as it takes to make some times the bytes that cross it. A
residual stream is a waist between a layer's two halves, and inside a layer nothing is. What is made within that reach
and read beyond it counts nowhere: a loop that collects results has waists between its steps. They lie further and
further apart, as more and more results cross; with `in_loops` what crossed the last two waists too makes no reach
longer, and every step has its waists. Either has its merits: long segments want few places, short ones many.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Mapping, Sequence

from recoup.solver.held import Op


def crossing_bytes(ops: Sequence[Op], value_bytes: Sequence[int], results: Sequence[int] = ()) -> list[int]:
    """Returns for each place between ops the bytes made before it and read after it.

    Place i is before op i; there is one more than ops. Values that no op makes do not count; `results` are read last.
    """
    last_read = _last_read(ops, results)
    change = [0] * (len(ops) + 2)
    for i, op in enumerate(ops):
        for value in op.outputs:
            last = last_read.get(value, i)
            if last > i:
                change[i + 1] += value_bytes[value]
                change[last + 1] -= value_bytes[value]
    return list(itertools.accumulate(change))[: len(ops) + 1]


def waists(
    ops: Sequence[Op],
    value_bytes: Sequence[int],
    results: Sequence[int] = (),
    *,
    reach: int = 1,
    in_loops: bool = False,
    allowed: Collection[int] | None = None,
) -> list[int]:
    """Returns the places to cut, in order, the two ends left out.

    Args:
        ops: in forward order.
        value_bytes: of each value.
        results: values read after the last op.
        reach: a waist is the narrowest place until this many times the bytes that cross it are made, on either side.
        in_loops: of the bytes that cross it, those do not count there that crossed the last two waists.
        allowed: the places there are, None for any.
    """
    crossing = crossing_bytes(ops, value_bytes, results)
    last_read = _last_read(ops, results)
    made = [0, *itertools.accumulate(sum(value_bytes[v] for v in op.outputs) for op in ops)]
    ends = _ends(ops, last_read)
    outputs = [[(last_read.get(v, i), value_bytes[v]) for v in op.outputs] for i, op in enumerate(ops)]
    before, found = 0, [0]  # the last two waists
    older = old = 0  # the bytes at hand that crossed both of them, and the last one
    for place in range(1, len(ops)):
        gone = ends[place - 1]
        older -= sum(value_bytes[v] for made_at, v in gone if made_at < before)
        old -= sum(value_bytes[v] for made_at, v in gone if made_at < found[-1])
        far = reach * (crossing[place] - (older if in_loops else 0))
        first = bisect.bisect_left(made, made[place] - far)
        end = bisect.bisect_right(made, made[place] + far)
        # Of equally narrow places the first, and where nothing is narrower anywhere, one every so often.
        if made[place] - made[found[-1]] <= far or (allowed is not None and place not in allowed):
            continue
        if _is_narrowest(place, range(first, end), crossing, outputs, allowed):
            older, old = old, crossing[place]
            before = found[-1]
            found.append(place)
    return found[1:]


def _is_narrowest(
    place: int,
    window: range,
    crossing: Sequence[int],
    outputs: Sequence[Sequence[tuple[int, int]]],
    allowed: Collection[int] | None,
) -> bool:
    """Whether fewer bytes cross no other place of a window; asked from the place on outwards, where most others are.

    What is made in the window and read beyond it crosses the next waist too, wherever this one is: a loop's results.

    Args:
        outputs: of each op, the last op that reads each of its values, and their bytes.
    """
    handed_on, end = 0, window.stop
    for other in range(place - 1, window.start - 1, -1):
        handed_on += sum([nbytes for last, nbytes in outputs[other] if last >= end])
        if crossing[other] + handed_on < crossing[place] and (allowed is None or other in allowed):
            return False
    handed_on = 0
    for other in range(place + 1, end):
        handed_on += sum([nbytes for last, nbytes in outputs[other - 1] if last >= end])
        if crossing[other] - handed_on < crossing[place] and (allowed is None or other in allowed):
            return False
    return True


def _ends(ops: Sequence[Op], last_read: Mapping[int, int]) -> list[list[tuple[int, int]]]:
    """Returns for each op the values that it is the last to read, each with the op that makes it."""
    ends: list[list[tuple[int, int]]] = [[] for _ in range(len(ops) + 1)]
    for i, op in enumerate(ops):
        for v in op.outputs:
            if last_read.get(v, i) > i:
                ends[last_read[v]].append((i, v))
    return ends


def _last_read(ops: Sequence[Op], results: Sequence[int]) -> dict[int, int]:
    return {v: i for i, op in enumerate(ops) for v in op.inputs} | dict.fromkeys(results, len(ops))
