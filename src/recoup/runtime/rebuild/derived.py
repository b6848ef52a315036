"""Saved tensors of a step that follows a program, rebuilt by flat lists of ops: what `rederived.py` does by search.

A list depends on what is at hand when backward asks: which of its values others hold, and which others wait for. There
are few such cases, and each is worked out once. Intermediates live until their last use, longer if somebody waits for
them soon; an op runs over one that nobody reads after it, as in a rebuild without a program.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from recoup.runtime import execution_context
from recoup.runtime.rebuild import shortcuts
from recoup.runtime.rebuild.cheap_ops import op_facts
from recoup.runtime.rebuild.constant import Constant
from recoup.runtime.rebuild.kept import Kept, changed_since, is_overwritten, laid
from recoup.runtime.rebuild.op_function import OpFunction
from recoup.runtime.rebuild.rederived import SOON_TURNS, constant_of, fitted, rerunning
from recoup.runtime.rebuild.surroundings import Surroundings
from recoup.runtime.rebuild.values import Geometry, Made, Read, Value

_ABSENT, _AWAITED, _HELD = range(3)  # what others do with a value: nothing, wait for it soon, hold it


class FlatOp:
    """One op on numbered values.

    Attributes:
        order: its place in the step. reads: number and geometry of each tensor that it reads, in order, then of those
            of its other results that help (`shortcuts.from_side_results`). output: which of its results is the value's,
            -1 for its only one. base: how that lay.
    """

    __slots__ = (
        "_args",
        "_at",
        "_facts",
        "_kwargs",
        "_op",
        "_rest",
        "_sides",
        "base",
        "order",
        "output",
        "reads",
    )

    def __init__(self, made: Made, value: Value, numbers: dict[Value, int]) -> None:
        assert value.base is not None
        self._facts = op_facts(made.function)
        self._op = OpFunction(made.function)
        self.order = made.order
        self.base: Geometry = value.base
        self.reads = tuple([(numbers[read.value], read.geometry) for read in made.reads])
        self.output = value.output if len(made.function._schema.returns) > 1 else -1
        num = len(made.reads)
        lead = len(made.args) >= num and all(item is read for item, read in zip(made.args, made.reads, strict=False))
        self._rest: tuple[Any, ...] | None = tuple(made.args[num:]) if lead else None
        places = {id(read): i for i, read in enumerate(made.reads)}
        self._args, self._kwargs = _numbered(made.args, places), _numbered(made.kwargs, places)
        at = tuple([i for i, item in enumerate(made.args) if type(item) is Read])
        self._at = at if len(at) == num and not lead else None
        sides = [ref() for ref in made.outputs[1:]] if made.side_results and value.output == 0 else []
        self._sides = len(sides)
        self.reads += tuple(
            [(numbers[side], side.base) for side in sides if side is not None and side.base is not None]
        )

    def run(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Returns the value's contents, made from what the op reads."""
        if self._sides:
            tensors, sides = tensors[: -self._sides], tensors[-self._sides :]
            results = shortcuts.from_side_results(self._facts, _filled(self._args, tensors), sides)
            if results is not None:
                return results[0]  # type: ignore[no-any-return]
        call = self._op.call
        if self._rest is not None:
            out = call(*tensors, *self._rest, **self._kwargs)
        elif self._at is not None:
            args = list(self._args)
            for place, tensor in zip(self._at, tensors, strict=True):
                args[place] = tensor
            out = call(*args, **self._kwargs)
        else:
            out = call(*_filled(self._args, tensors), **_filled(self._kwargs, tensors))
        return out if self.output < 0 else out[self.output]  # type: ignore[no-any-return]

    def over(self, spare: Sequence[bool]) -> tuple[OpFunction, int] | None:
        """Returns the op that writes over a tensor, and which of those that are read it is; None if there is none.

        Args:
            spare: of each tensor read, whether nobody reads it after this op.
        """
        if self._rest is None or self.output >= 0 or self._sides:
            return None
        places = shortcuts.targets(self._facts, [geometry for _, geometry in self.reads], self._kwargs, self.base)
        target = next((at for at in places if spare[at]), None)
        return None if target is None else (OpFunction(self._facts.over), target)

    def run_over(self, over: tuple[OpFunction, int], tensors: list[torch.Tensor]) -> torch.Tensor:
        """As `run`, writing over one of the tensors."""
        op, target = over
        assert self._rest is not None
        out: torch.Tensor = op.call(*(tensors if not target else tensors[::-1]), *self._rest, **self._kwargs)
        return out


def _numbered(items: Any, places: dict[int, int]) -> Any:
    """Returns arguments with the number of each read in its place."""
    if isinstance(items, dict):
        return {key: _numbered(item, places) for key, item in items.items()}
    if type(items) is Read:
        return _Place(places[id(items)])
    return type(items)([_numbered(item, places) for item in items]) if type(items) in (list, tuple) else items


def _filled(items: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(items, dict):
        return {key: _filled(item, tensors) for key, item in items.items()}
    if type(items) is _Place:
        return tensors[items.number]
    return type(items)([_filled(item, tensors) for item in items]) if type(items) in (list, tuple) else items


class _Place:
    """Stands for a tensor among an op's arguments."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Recipe:
    """What to run for one value, given what is at hand.

    Attributes:
        starts: numbers of sources, with their places among the saved tensor's. constants: numbers of parameters.
        steps: each an op, its number, what it reads (a geometry where it has to be laid out), how it runs over one of
            them, numbers that nobody reads after it, and whether others wait for its result.
    """

    __slots__ = ("constants", "starts", "steps")

    def __init__(self) -> None:
        self.starts: dict[int, int] = {}
        self.constants: list[int] = []
        self.steps: list[tuple[FlatOp, int, Any, tuple[OpFunction, int] | None, tuple[int, ...], bool]] = []


class Rebuilding:
    """How the saved tensors of a program are rebuilt, the same for all of its steps.

    Args:
        ops: by number of the value that they make. saved: value's number of each rebuilt saved tensor by its index
            among all, and the numbers of its sources. turns: how many that are no parameters are saved before each.
    """

    def __init__(
        self, ops: dict[int, FlatOp], saved: dict[int, tuple[int, tuple[int, ...]]], turns: Sequence[int]
    ) -> None:
        self._ops = ops
        self._saved = saved
        self._recipes: dict[Any, _Recipe] = {}
        savers: dict[int, list[int]] = {}
        for index, (number, _) in saved.items():
            savers.setdefault(number, []).append(index)
        self.shared: dict[int, list[tuple[int, list[tuple[int, bool]]]]] = {}
        for index, (number, sources) in saved.items():
            soon = turns[index] - SOON_TURNS
            others = {n: [i for i in savers.get(n, ()) if i != index] for n in self._chain(number, sources)}
            self.shared[index] = [(n, [(i, turns[i] >= soon) for i in found]) for n, found in others.items() if found]

    def _chain(self, number: int, ends: Sequence[int]) -> list[int]:
        """Returns the numbers of the values that lead from `ends` to a value, that one first."""
        found, stack = dict.fromkeys([number]), [number]
        if number in ends:  # kept in fewer bytes
            return []
        while stack:
            for read, _ in self._ops[stack.pop()].reads:
                if read not in found and read not in ends and read in self._ops:
                    found[read] = None
                    stack.append(read)
        return list(found)

    def recipe(self, index: int, states: tuple[int, ...]) -> _Recipe:
        """Returns what to run for a saved tensor.

        Args:
            states: what others do with the values that they share with it.
        """
        found = self._recipes.get((index, states))
        if found is None:
            found = self._recipes[index, states] = self._recipe(index, states)
        return found

    def _recipe(self, index: int, states: tuple[int, ...]) -> _Recipe:
        number, sources = self._saved[index]
        state_of = {n: s for (n, _), s in zip(self.shared[index], states, strict=True)}
        held = {n for n, s in state_of.items() if s == _HELD}
        recipe = _Recipe()
        last: set[int] = set()
        chain = [n for n in self._chain(number, [*sources, *held]) if n not in held]
        for made in sorted(chain, key=lambda n: self._ops[n].order, reverse=True):
            op = self._ops[made]
            drops, spare, reads = [], [], []
            numbers = [n for n, _ in op.reads]
            for n, geometry in op.reads:
                is_made = n in chain
                is_last = is_made and n not in last
                lies_so = is_made and geometry == self._ops[n].base
                spare.append(is_last and lies_so and numbers.count(n) == 1 and not state_of.get(n))
                reads.append((n, None if lies_so else geometry))
                if is_last or (n in sources and n not in last):
                    drops.append(n)
            last.update(numbers)
            recipe.steps.append(
                (op, made, tuple(reads), op.over(spare), tuple(dict.fromkeys(drops)), bool(state_of.get(made)))
            )
        recipe.steps.reverse()
        if not chain:
            last.add(number)
        recipe.starts = {n: sources.index(n) for n in last if n in sources}
        recipe.constants = [n for n in last if n not in sources and n not in held and n not in chain]
        return recipe


class Derivation:
    """The rebuilt tensors of one step.

    Attributes:
        constants: parameters by number. refs: the `Derived` of each saved tensor, by index.
    """

    __slots__ = ("_counts", "_under", "constants", "rebuilding", "refs")

    def __init__(self, rebuilding: Rebuilding, constants: dict[int, Constant], under: Surroundings) -> None:
        self.rebuilding = rebuilding
        self.constants = constants
        self.refs: dict[int, weakref.ref[Derived]] = {}
        self._under = under
        self._counts = execution_context.current_counts()

    def rebuild(self, asked: Derived) -> torch.Tensor:
        """Returns the contents of a saved tensor."""
        if self._under.are_here():
            return self._rebuild(asked)
        with self._under.again():
            return self._rebuild(asked)

    def _rebuild(self, asked: Derived) -> torch.Tensor:
        here: dict[int, torch.Tensor] = {}
        waiting: dict[int, list[Derived]] = {}
        states = []
        for number, others in self.rebuilding.shared[asked.index]:
            state = _ABSENT
            for index, is_soon in others:
                ref = self.refs.get(index)
                other = None if ref is None else ref()
                if other is None or other.is_served:
                    continue
                if other.held is not None:
                    here[number] = other.held
                    state = _HELD
                elif is_soon:
                    waiting.setdefault(number, []).append(other)
                    state = state or _AWAITED
            states.append(state)
        recipe = self.rebuilding.recipe(asked.index, tuple(states))
        number = asked.number
        with rerunning():
            starts = recipe.starts
            for constant in recipe.constants:
                here[constant] = constant_of(self.constants[constant])
            for op, made, reads, over, drops, is_awaited in recipe.steps:
                for n, _ in reads:
                    if n in starts and n not in here:  # now, since what is kept in fewer bytes is made anew
                        here[n] = asked.sources[starts[n]].contents()
                tensors = [here[n] if geometry is None else laid(here[n], geometry) for n, geometry in reads]
                for n in drops:
                    del here[n]
                out = op.run(tensors) if over is None else op.run_over(over, tensors)
                del tensors
                out = here[made] = fitted(out, op.base)
                if is_awaited:
                    for other in waiting.get(made, ()):
                        other.held = out
                del out
            for other in waiting.get(number, ()):
                other.held = here[number]
            execution_context.count("num_rederived", self._counts)
            if not recipe.steps and number in starts:
                here[number] = asked.sources[starts[number]].contents().detach()
            return laid(here[number], asked.geometry)

    def give(self, asked: Derived, held: torch.Tensor) -> None:
        """Called when a tensor was asked for that was at hand: those who wait for the same hold it on."""
        execution_context.count("num_rederived", self._counts)
        for number, others in self.rebuilding.shared[asked.index][:1]:
            for index, is_soon in others if number == asked.number else ():  # its own come first
                ref = self.refs.get(index)
                other = None if ref is None else ref()
                if other is not None and is_soon and not other.is_served:
                    other.held = held


class Derived:
    """What autograd gets instead of a saved tensor.

    Attributes:
        index: among the saved tensors of the step. number, value: of its value. sources: what it is rebuilt from.
            held: the contents, once they were rebuilt for somebody else. is_served: it was asked for.
    """

    __slots__ = ("__weakref__", "_step", "geometry", "held", "index", "is_served", "number", "sources", "value")

    def __init__(
        self, step: Derivation, index: int, number: int, value: Value, geometry: Geometry, sources: list[Kept]
    ) -> None:
        self._step = step
        self.index = index
        self.number = number
        self.value = value
        self.geometry = geometry
        self.sources = sources
        self.held: torch.Tensor | None = None
        self.is_served = False
        for source in sources:
            source.is_source = True
        step.refs[index] = weakref.ref(self)

    def unpack(self) -> torch.Tensor:
        """Returns the tensor; raises if it was changed in place since it was saved, as autograd would."""
        if self.value.overwritten and is_overwritten(self.value, self.geometry):
            size, _, _, dtype = self.geometry
            raise changed_since(f"{dtype} {list(size)}")
        held, self.held = self.held, None
        self.is_served = True
        if held is None:
            return self._step.rebuild(self)
        self._step.give(self, held)
        return laid(held, self.geometry)
