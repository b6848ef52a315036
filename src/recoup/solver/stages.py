"""What a walk over a call passes, from its last leaf to its first: stretches of leaves, and calls that are a choice.

Calls that may not be regions are their parts, inlined. A unit (leaves that act together) forks the walk in the stretch
of its last leaf and joins it behind its first. Between two joins nothing is chosen, so that the leaves of a stretch are
composed once (`pareto.composed`) for each set of units that rederive, and a walk makes one front of them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set as AbstractSet

from recoup.solver.pareto import Leaves, composed
from recoup.solver.problem import Leaf, Option
from recoup.solver.sequence import Call, Line

_Units = frozenset[int]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Stretch:
    """Leaves in a row; only the first may have more than one option.

    Attributes:
        opening: the units that fork the walk here, each behind its first leaf.
        closing: the units that join it before the first leaf.
        units: of the leaves.
        leaves: positions in the line.
        composed: by the units that rederive.
    """

    opening: tuple[tuple[int, int], ...]
    closing: _Units
    units: _Units
    leaves: range
    composed: dict[_Units, list[Leaves]]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Stop:
    """A call that may be a region, or begin one, or move what it saves: part `index` of the call `around`."""

    call: Call
    around: Call
    index: int
    is_region: bool


class Stages:
    """The stages of the calls of a line.

    Args:
        actions: what leaves may do.
        forking: the units that may rederive.
        linking: those that may do so where they link the calls of a span.
    """

    def __init__(
        self, line: Line, *, actions: AbstractSet[str], forking: AbstractSet[int], linking: AbstractSet[int]
    ) -> None:
        self._line = line
        self._actions = actions
        self._forking = forking
        self._closing = forking | linking
        self._stages: dict[int, tuple[Stretch | Stop, ...]] = {}  # by identity of the call

    def of(self, call: Call) -> tuple[Stretch | Stop, ...]:
        """Returns the stages of a call, in forward order."""
        found = self._stages.get(id(call))
        if found is None:
            stages: list[Stretch | Stop] = []
            behind: list[int] = []
            for part in reversed(self._parts(call)):
                if isinstance(part, Stop):
                    stages += [*self._stretch(behind), part]
                    behind = []
                    continue
                behind.append(part)
                if self._is_join(part):
                    stages += self._stretch(behind)
                    behind = []
            stages += self._stretch(behind)
            found = self._stages[id(call)] = tuple(reversed(stages))
        return found

    def composed(self, stretch: Stretch, rederived: _Units) -> list[Leaves]:
        """Returns the ways to run a stretch under the units that rederive."""
        rederived &= stretch.units
        found = stretch.composed.get(rederived)
        if found is None:
            rest = [(self._options(i, rederived)[0], self._line.leaves[i].gradient_bytes) for i in stretch.leaves[1:]]
            first = stretch.leaves[0]
            gradient_bytes = self._line.leaves[first].gradient_bytes
            found = [composed([(option, gradient_bytes), *rest]) for option in self._options(first, rederived)]
            stretch.composed[rederived] = found
        return found

    def _parts(self, call: Call) -> list[int | Stop]:
        """Returns leaves, by position in the line, and calls that are a choice."""
        found: list[int | Stop] = []
        for i, part in enumerate(call.parts):
            if isinstance(part, Leaf):
                found.append(call.starts[i])
                continue
            is_region = self._may_be_region(part, call.parts[i - 1] if i else None)
            if is_region or part.block.offloads:
                found.append(Stop(call=part, around=call, index=i, is_region=is_region))
            else:
                found += self._parts(part)
        return found

    def _may_be_region(self, call: Call, before: Leaf | Call | None) -> bool:
        """Whether a region may begin with the call, or a span that begins before it go through it."""
        region = call.block.region
        if region is None or "recompute" not in self._actions:
            return False
        return region.is_alone or call.following is not None or (isinstance(before, Call) and before.following is call)

    def _is_join(self, position: int) -> bool:
        unit = self._line.unit_of[position]
        if unit in self._closing and self._line.units[unit][0] == position:
            return True
        if len(self._line.leaves[position].options) == 1:
            return False
        return max(len(self._options(position, frozenset())), len(self._options(position, frozenset({unit})))) > 1

    def _stretch(self, behind: list[int]) -> list[Stretch]:
        """Returns leaves, given from the last to the first, as a stretch; none if there are none."""
        if not behind:
            return []
        units = self._line.units
        touched = {self._line.unit_of[i] for i in behind} - {-1}
        inside = set(behind)
        opening = [u for u in sorted(touched & self._forking) if units[u][-1] in inside]
        return [
            Stretch(
                opening=tuple((units[u][0], u) for u in opening),
                closing=frozenset(u for u in touched & self._closing if units[u][0] == behind[-1]),
                units=frozenset(touched),
                leaves=range(behind[-1], behind[0] + 1),
                composed={},
            )
        ]

    def _options(self, position: int, rederived: _Units) -> list[Option]:
        """Returns the options of a leaf; one that belongs to a unit does what the unit does."""
        leaf = self._line.leaves[position]
        options = [o for o in leaf.options if o.rung is not None or o.ambient in self._actions]
        options = options or list(leaf.options[:1])
        unit = self._line.unit_of[position]
        if len(options) > 1 and unit >= 0:
            action = "rederive" if unit in rederived else "save"
            options = [o for o in options if o.ambient == action]
        return options
