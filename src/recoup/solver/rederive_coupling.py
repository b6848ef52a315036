"""Fronts inside spans whose calls are linked: a unit with leaves in several calls rederives in all of them or in none.

A span's inside is walked from its last call to its first. All spans that end with the same call share that walk, so
each is the one shorter by its first call, with that call before it. In between there is one front for each set of
units that rederive and reach further to the left; the span's own is the one in which none does.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence

from recoup.solver.pareto import Front, empty
from recoup.solver.problem import Leaf
from recoup.solver.sequence import Call

# A unit, wherever the span lies: how many calls before the span's last call it ends, and which open unit of that it is.
_Name = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Linked:
    """The inside of a span, and the units that begin before it.

    Attributes:
        structure: equal for equal numbers.
        fronts: for each set of units that rederive and reach out.
    """

    structure: int
    fronts: Mapping[frozenset[_Name], Front]


class Links:
    """The units that link the parts of one call.

    Args:
        parts: of the call.
        reaches: the first and the last part that a unit touches.
        walk: returns the fronts of a call followed by others, by the units that rederive and begin before it.
        structure: returns a small number, the same for equal values.
        known: what was found before, by structure.
    """

    def __init__(
        self,
        parts: Sequence[Leaf | Call],
        reaches: Mapping[int, tuple[int, int]],
        *,
        walk: Callable[[Call, Mapping[frozenset[int], Front]], Mapping[frozenset[int], Front]],
        structure: Callable[[Hashable], int],
        known: MutableMapping[Hashable, Linked],
    ) -> None:
        self._parts = parts
        self._reaches = reaches
        self._walk = walk
        self._structure = structure
        self._known = known
        self._nothing = empty()
        self._positions: dict[int, int] = {}  # of each unit, among the open ones of the last part it touches
        self._opening: dict[int, list[int]] = {}
        for unit, (_, last) in reaches.items():
            part = parts[last]
            if isinstance(part, Call) and unit in part.open_units:
                self._positions[unit] = part.open_units.index(unit)
                self._opening.setdefault(last, []).append(unit)
        self._spans: dict[tuple[int, int], Linked] = {}

    def extend(self, first: int, length: int) -> Linked:
        """Returns the inside of the span over `length` parts, calls all of them, that begins at part `first`."""
        found = self._spans.get((first, length))
        if found is None:
            rest = self.extend(first + 1, length - 1) if length > 1 else None
            found = self._spans[first, length] = self._before(first, length, rest)
        return found

    def _before(self, first: int, length: int, rest: Linked | None) -> Linked:
        call = self._parts[first]
        assert isinstance(call, Call), "a span runs over calls"
        end = first + length - 1
        roles = tuple(self._role(unit, first, end) for unit in call.open_units)
        key = ("linked", call.structure, roles, -1 if rest is None else rest.structure)
        found = self._known.get(key)
        if found is not None:
            return found
        before = {frozenset[_Name](): self._nothing} if rest is None else rest.fronts
        active: dict[frozenset[int], Front] = {}
        for state, after in before.items():
            units = frozenset(self._unit(name, end) for name in state)
            active |= dict.fromkeys(forks(units, self._opening.get(first, ())), after)
        walked = self._walk(call, active)
        fronts = {frozenset(self._name(unit, end) for unit in state): front for state, front in walked.items()}
        linked = self._known[key] = Linked(structure=self._structure(key), fronts=fronts)
        return linked

    def _role(self, unit: int, first: int, end: int) -> tuple[_Name, bool] | None:
        """Returns a unit's name and whether it ends with this call; None if it may not rederive in this span."""
        if unit not in self._positions or self._reaches[unit][1] > end:
            return None
        return self._name(unit, end), self._reaches[unit][0] == first

    def _name(self, unit: int, end: int) -> _Name:
        return end - self._reaches[unit][1], self._positions[unit]

    def _unit(self, name: _Name, end: int) -> int:
        part = self._parts[end - name[0]]
        assert isinstance(part, Call), "a span runs over calls"
        return part.open_units[name[1]]


def forks(state: frozenset[int], opening: Sequence[int]) -> Iterator[frozenset[int]]:
    """Yields `state` extended by every subset of the units that begin here."""
    for size in range(len(opening) + 1):
        for units in itertools.combinations(opening, size):
            yield state.union(units)
