"""Numbers of ops that run again, which vary from step to step as an argument of their call does: see
[Note: dynamic shapes] in `dynamic_program.py`.

`x / len(x)`, a pad, the weight of a mixed batch: where the function that is called is the op itself, its number is the
call's. That both steps had it so proves it of these functions alone: others may take the smaller of two numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recoup.runtime.rebuild.call_code import Nest
from recoup.runtime.rebuild.dynamic_shapes import AnyOf, Number
from recoup.runtime.rebuild.of_any_size import is_the_op
from recoup.runtime.rebuild.op_forms import TENSOR
from recoup.runtime.rebuild.step_program import ProgramCall

_Place = tuple[int, ...]


class Differ(Exception):
    """Two steps did not do the same."""


class _At:
    """Stands for an argument of an op: the place of the one of its call that it is."""

    def __init__(self, place: _Place) -> None:
        self.place = place


class Numbers:
    """Compares the arguments of an op in two steps.

    Args:
        before, call: in which it runs, of the earlier step and of the later one. form: of the op.

    Attributes:
        places: of the arguments of the call that the op is given, and that vary.
    """

    def __init__(self, before: ProgramCall, call: ProgramCall, form: Any) -> None:
        self.places: set[_Place] = set()
        self._calls = before, call
        self._is_the_op = is_the_op(call.func, form)

    def merged(self, one: Any, other: Any, index: int = -1) -> Any:
        """Returns what two arguments have in common, an `_At` in the place of each that varies.

        Args:
            one: of earlier steps, a `Number` where it varied in these. index: in its list, -1 where it is in none.

        Raises:
            Differ: they are others, and not those of the call.
        """
        if isinstance(one, Number):
            if repr(_at(self._calls[1], one.place)) != repr(other):
                raise Differ
            self.places.add(one.place)
            return _At(one.place)
        if type(one) is not type(other):
            raise Differ
        if isinstance(one, dict):
            if [*one] != [*other]:
                raise Differ
            return {key: self.merged(one[key], item) for key, item in other.items()}
        if isinstance(one, (list, tuple)):
            if len(one) != len(other):
                raise Differ
            pairs = enumerate(zip(one, other, strict=True))
            return type(other)([self.merged(a, b, i) for i, (a, b) in pairs])
        if one is other or (TENSOR not in (one, other) and repr(one) == repr(other)):
            return other
        if TENSOR in (one, other) or not self._is_the_op:
            raise Differ
        known = type(one), repr(one), repr(other)
        places = [at for at, (a, b) in _numbers(*self._calls) if (type(a), repr(a), repr(b)) == known]
        if len(places) > 1:  # the same pad on both sides: in another step they may be two
            places = [at for at in places if len(at) > 1 and at[-1] == index]
        if len(places) != 1:
            raise Differ
        self.places.add(places[0])
        return _At(places[0])


def with_numbers(item: Any, numbers: Mapping[_Place, Number]) -> Any:
    """Returns an op's arguments with a `Number` in the place of each that varies."""
    if isinstance(item, _At):
        return numbers[item.place]
    if isinstance(item, dict):
        return {key: with_numbers(part, numbers) for key, part in item.items()}
    return type(item)([with_numbers(part, numbers) for part in item]) if isinstance(item, (list, tuple)) else item


def _at(call: ProgramCall, place: _Place) -> Any:
    """Returns an argument of a call."""
    item: Any = call.items
    for i in place:
        item = (item.parts if isinstance(item, Nest) else item)[i]
    return item.value if isinstance(item, AnyOf) else item


def _numbers(one: ProgramCall, other: ProgramCall) -> Iterator[tuple[_Place, tuple[Any, Any]]]:
    """Yields the places of the numbers that two calls were handed, with both."""
    pending: list[_Place] = [(i,) for i in range(len(other.items or ()))]
    for place in pending:
        item = _at(other, place)
        if type(item) in (int, float):
            yield place, (_at(one, place), item)
        elif isinstance(item, (list, tuple, Nest)):
            parts = item.parts if isinstance(item, Nest) else item
            pending += [(*place, i) for i in range(len(parts))]
