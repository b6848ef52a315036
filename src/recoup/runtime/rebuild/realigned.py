"""Where a plan's marks lie in a call that runs other ops than the planned one: a first step without a state, a loop of
fewer rounds.

The ops that a plan does not mark are not known, so that there is no list to compare with. Marks meet ops of their
names, in order; to change the distance from where the plan has them costs as much as any change, and to meet none half
as much again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from recoup.ir.decision import OpMark
from recoup.thresholds import MOST_REMEMBERED_ANSWERS

_Way = tuple[OpMark, int, "_Way"] | None  # the last mark, the number of its op, and the way before


def realigned(marks: Sequence[OpMark], names: Sequence[str]) -> dict[int, OpMark]:
    """Returns the marks by the number of the op that each meets; those that meet none are left out.

    Args:
        marks: of a call, in order. names: of the ops that it ran instead.
    """
    places: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        places.setdefault(name, []).append(i)
    change = len(names) + max([mark.ordinal for mark in marks], default=0) + 1  # more than any distance
    ways: dict[tuple[int, int], tuple[int, _Way]] = {(-1, 0): (0, None)}  # by the last mark's op, and its distance
    for mark in marks:
        found = {at: (cost + change + change // 2, way) for at, (cost, way) in ways.items()}
        for place in places.get(mark.op, ()):
            distance = place - mark.ordinal
            for (end, other), (cost, way) in ways.items():
                if end < place:
                    cost += change + abs(distance - other) if distance != other else 0
                    if cost < found.get((place, distance), (cost + 1,))[0]:
                        found[place, distance] = cost, (mark, place, way)
        best = sorted(found, key=lambda at: found[at][0])[:MOST_REMEMBERED_ANSWERS]
        ways = {at: found[at] for at in best}
    _, way = min(ways.values(), key=lambda each: each[0])
    at: dict[int, OpMark] = {}
    while way is not None:
        mark, place, way = way
        at[place] = dataclasses.replace(mark, ordinal=place)
    return at
