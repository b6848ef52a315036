"""Where a plan's marks lie in a call that runs other ops than the planned one: a first step without a state, a loop of
fewer rounds.

The ops that a plan does not mark are not known, so that there is no list to compare with. Marks meet ops of their
names, in order; to change the distance from where the plan has them costs as much as any change, and to meet none half
as much again. Where the steps are alike from the first op on, marks stay; and what was to begin with an op that is met
by none, begins with the one that stands there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from recoup.ir.decision import OpMark
from recoup.thresholds import MOST_REMEMBERED_ANSWERS

_Way = tuple[OpMark, int, "_Way"] | None  # the last mark, the number of its op, and the way before


def realigned(marks: Sequence[OpMark], names: Sequence[str], num_alike: int = 0) -> dict[int, OpMark]:
    """Returns the marks by the number of the op that each meets; of those that meet none, what begins with them.

    Args:
        marks: of a call, in order. names: of the ops that it ran instead. num_alike: ops that both begin with.
    """
    found = {mark.ordinal: mark for mark in marks if mark.ordinal < num_alike}
    rest = [mark for mark in marks if mark.ordinal >= num_alike]
    places = _places(rest, names, num_alike)
    found |= {place: dataclasses.replace(mark, ordinal=place) for mark, place in places.items()}
    end, last = num_alike, num_alike  # of what was met: the number of the next op, here and in the plan
    for mark in rest:
        place = places.get(mark)
        if place is None:
            place = end + mark.ordinal - last
            later = (places[other] for other in rest if other in places and other.ordinal > mark.ordinal)
            place = min(place, next(later, place))
            if place < len(names) and mark.begins:
                found[place] = also_begins(found.get(place), mark, place, names[place])
        else:
            end, last = place + 1, mark.ordinal + 1
    return found


def also_begins(here: OpMark | None, mark: OpMark, place: int, name: str) -> OpMark:
    """Returns the mark of an op with which begins, too, what begins with `mark`."""
    here = here or OpMark(path=mark.path, call=mark.call, ordinal=place, op=name)
    saves = here.saves if here.begins_segment else mark.saves
    begins_segment = here.begins_segment or mark.begins_segment
    begins_piece = here.begins_piece or mark.begins_piece
    return dataclasses.replace(here, begins_segment=begins_segment, begins_piece=begins_piece, saves=saves)


def _places(marks: Sequence[OpMark], names: Sequence[str], first: int) -> dict[OpMark, int]:
    """Returns the number of the op that each mark meets, of those from `first` on."""
    places: dict[str, list[int]] = {}
    for i, name in enumerate(names[first:], start=first):
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
    met: dict[OpMark, int] = {}
    while way is not None:
        mark, place, way = way
        met[mark] = place
    return met
