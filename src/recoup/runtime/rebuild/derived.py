"""Saved tensors of a step that follows a program, rebuilt by written code: what `rederived.py` does by search.

What is to run depends on what is at hand when backward asks: which of the values on the way others hold, and which
others wait for. There are few such cases, and each is written out once ([Note: rebuild code]). Intermediates live until
their last use, longer if somebody waits for them soon; an op runs over one that nobody reads after it, as in a rebuild
without a program.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch

from recoup.runtime import execution_context
from recoup.runtime.rebuild import shortcuts
from recoup.runtime.rebuild.cheap_ops import op_facts
from recoup.runtime.rebuild.constant import Constant
from recoup.runtime.rebuild.kept import Kept, changed_since, is_overwritten, laid
from recoup.runtime.rebuild.op_forms import TENSOR, with_tensors
from recoup.runtime.rebuild.op_function import OpFunction
from recoup.runtime.rebuild.rebuild_code import RebuildCode, Rerun
from recoup.runtime.rebuild.rederived import SOON_TURNS, constant_of, rerunning
from recoup.runtime.rebuild.surroundings import Surroundings
from recoup.runtime.rebuild.values import Geometry, Made, Read, Value
from recoup.runtime.rebuild.varied_ops import VariedOps

_ABSENT, _AWAITED, _HELD = range(3)  # what others do with a value: nothing, wait for it soon, hold it


class NumberedOp:
    """One op on numbered values.

    Attributes:
        op, over, first, rest, kwargs, is_single: as `OpForm`'s.
        order: its place in the step. reads: number and geometry of each tensor that it reads, in order, then of those
            of its other results that help (`shortcuts.from_side_results`). output: which of its results is the value's.
            base: how that lay. targets: places of the tensors that it may write its result over.
        call: of the program, in which it runs. picks: numbers of what it reads there: of the call's tensors, then of
            what was made in it.
    """

    __slots__ = (
        *("base", "call", "first", "is_single", "kwargs", "op", "order", "output", "over", "picks", "reads", "rest"),
        "targets",
    )
    is_cast = False

    def __init__(
        self, made: Made, value: Value, numbers: dict[Value, int], call: Any, handed: Sequence[Value | None]
    ) -> None:
        assert value.base is not None
        facts = op_facts(made.function)
        reads: list[Read] = []
        self.rest: Any = _without_reads(made.args, reads)
        self.kwargs: dict[str, Any] = {key: _without_reads(item, reads) for key, item in made.kwargs.items()}
        num = len(reads)
        self.first = len(made.args) >= num and all(item is TENSOR for item in self.rest[:num])
        if self.first:
            self.rest = self.rest[num:]
        self.order = made.order
        self.base: Geometry = value.base
        self.reads = tuple([(numbers[read.value], read.geometry) for read in reads])
        self.output = value.output
        self.is_single = len(made.function._schema.returns) == 1
        self.op: OpFunction = OpFunction(made.function)
        self.over: OpFunction | None = None
        self.targets: Sequence[int] = ()
        self.call = call
        places = {handed[i]: i for i in reversed(range(len(handed)))}
        self.picks = tuple([places.get(read.value, len(handed)) for read in reads])
        sides = [ref() for ref in made.outputs[1:]] if made.side_results and value.output == 0 else []
        if sides:
            self.op = OpFunction(BySides(facts, made.function, num, self.first, self.rest, self.kwargs))
            self.first, self.rest, self.kwargs = True, (), {}
            self.reads += tuple([(numbers[side], side.base) for side in sides if side is not None and side.base])
            self.picks += (len(handed),) * (len(self.reads) - num)
        elif self.first and self.is_single:
            self.targets = shortcuts.targets(facts, [read.geometry for read in reads], self.kwargs, self.base)
            self.over = OpFunction(facts.over) if self.targets else None

    @property
    def geometries(self) -> Sequence[Geometry]:
        """Returns those of the tensors that it reads."""
        return [geometry for _, geometry in self.reads]

    @property
    def bases(self) -> Sequence[tuple[int, Geometry]]:
        """Returns the position of its result, and how that lay."""
        return ((self.output, self.base),)

    def target(self, spare: Sequence[bool]) -> int:
        """Returns the place of the tensor that it writes over, -1 for none.

        Args:
            spare: of each tensor read, whether nobody reads it after this op.
        """
        return next((at for at in self.targets if spare[at]), -1)


class BySides:
    """Runs an op whose first result can be had from its others: called with what it reads, then with those.

    Attributes:
        op: the overload.
    """

    def __init__(self, facts: Any, op: Any, num: int, first: bool, rest: Any, kwargs: dict[str, Any]) -> None:
        self._facts = facts
        self.op = op
        self._num = num
        self._args = (TENSOR,) * num + tuple(rest) if first else rest
        self._kwargs = kwargs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BySides) and self._told() == other._told()

    __hash__ = object.__hash__

    def _told(self) -> tuple[Any, ...]:
        return self.op, self._num, repr(self._args), repr(self._kwargs)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Returns the op's results."""
        each = iter(tensors)
        args = with_tensors(self._args, each)
        results = shortcuts.from_side_results(self._facts, args, tensors[self._num :])
        if results is not None:
            return results
        return self.op(*args, **{key: with_tensors((item,), each)[0] for key, item in self._kwargs.items()})


def _without_reads(item: Any, reads: list[Read]) -> Any:
    """Returns an argument with `TENSOR` in the place of each read, which joins `reads`."""
    if type(item) is Read:
        reads.append(item)
        return TENSOR
    return type(item)([_without_reads(part, reads) for part in item]) if type(item) in (list, tuple) else item


class Rebuilding(VariedOps):
    """How the saved tensors of a program are rebuilt, the same for all of its steps.

    Attributes:
        shared: by index of a saved tensor, the values on the way to it that others wait for: number, and of each other
            one its index and whether it is asked for soon; its own value comes first.
        places: by index, the place among its sources of each number.
        sources, constants, starts, narrow, around, asked: as a `SegmentProgram`'s.

    Args:
        ops: by number of the value that they make. saved: value's number of each rebuilt saved tensor by its index
            among all, and the numbers of its sources. turns: how many that are no parameters are saved before each.
    """

    around = -1
    starts: frozenset[int] = frozenset()

    def __init__(
        self,
        ops: dict[int, NumberedOp],
        saved: dict[int, tuple[int, tuple[int, ...]]],
        turns: Sequence[int],
        bases: dict[int, Geometry],
        constants: frozenset[int],
        narrow: frozenset[int],
    ) -> None:
        super().__init__()
        self._ops = ops
        self._saved = saved
        order = sorted(ops, key=lambda number: (ops[number].order, number))
        self._at = {number: at for at, number in enumerate(order)}
        self.ops = [(ops[n], tuple([read for read, _ in ops[n].reads]), ((ops[n].output, n),)) for n in order]
        self.calls = [ops[n].call for n in order]
        self.sources = frozenset([n for _, sources in saved.values() for n in sources])
        self.constants, self.narrow, self.asked = constants, narrow, saved
        self.bases = bases
        savers: dict[int, list[int]] = {}
        for index, (number, _) in saved.items():
            savers.setdefault(number, []).append(index)
        self.places = {index: {n: i for i, n in enumerate(sources)} for index, (_, sources) in saved.items()}
        self.shared: dict[int, list[tuple[int, list[tuple[int, bool]]]]] = {}
        for index, (number, sources) in saved.items():
            soon = turns[index] - SOON_TURNS
            others = {n: [i for i in savers.get(n, ()) if i != index] for n in self._chain(number, sources)}
            self.shared[index] = [(n, [(i, turns[i] >= soon) for i in found]) for n, found in others.items() if found]

    def picks(self, at: int) -> Sequence[int]:
        """Returns the numbers of the values that an op read in its call: of its tensors, then of what it made."""
        picks: Sequence[int] = self.ops[at][0].picks
        return picks

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

    def code(self, index: int, states: tuple[int, ...]) -> RebuildCode:
        """Returns what rebuilds a saved tensor, and what others wait for on the way.

        Args:
            states: what others do with the values that they share with it.
        """
        found = self._codes.get((index, states))
        if found is None:
            found = self._codes[index, states] = self._written(index, states)
        return found

    def _written(self, index: int, states: tuple[int, ...]) -> RebuildCode:
        those = [n for n, _ in self.shared[index]]
        held = {n for n, state in zip(those, states, strict=True) if state == _HELD}
        awaited = {n for n, state in zip(those, states, strict=True) if state == _AWAITED}
        wanted = {self._saved[index][0], *awaited}
        others = [twin._reruns(index, held, wanted) for twin in self.twins]
        reruns = self._of_all_sizes(self._reruns(index, held, wanted), others)
        return RebuildCode(reruns, wanted, starts=held, bases=self._kinds or self.bases, narrow=())

    def _reruns(self, index: int, held: Collection[int], wanted: Collection[int]) -> list[Rerun]:
        number, sources = self._saved[index]
        reruns = []
        last: set[int] = set()
        chain = [n for n in self._chain(number, [*sources, *held]) if n not in held]
        for made in sorted(chain, key=lambda n: self._ops[n].order, reverse=True):
            op = self._ops[made]
            numbers = [n for n, _ in op.reads]
            ends = {n for n in numbers if n not in last and n not in wanted}  # that nobody reads or wants after it
            spare, reads = [], []
            for n, geometry in op.reads:
                lies_so = n in chain and geometry == self.bases[n]
                spare.append(lies_so and n in ends and numbers.count(n) == 1)
                reads.append((n, None if lies_so else geometry))
            last.update(numbers)
            drops = tuple([n for n in dict.fromkeys(numbers) if n in ends and (n in chain or n in sources)])
            reruns.append(Rerun(op, tuple(reads), ((op.output, made),), drops, op.target(spare), self._at[made]))
        return reruns[::-1]


class Derivation:
    """The rebuilt tensors of one step.

    Attributes:
        constants: parameters by number. refs: the `Derived` of each saved tensor, by index. noted: see `StepRun`.
    """

    __slots__ = ("_counts", "_noted", "_under", "constants", "rebuilding", "refs")

    def __init__(
        self,
        rebuilding: Rebuilding,
        constants: dict[int, Constant],
        under: Surroundings,
        noted: dict[int, Any],
    ) -> None:
        self.rebuilding = rebuilding
        self.constants = constants
        self._noted = noted
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
        if asked.number in here:  # it was asked for before, and another saved tensor of its value was not yet
            execution_context.count("num_rederived", self._counts)
            return laid(here[asked.number], asked.geometry)
        code = self.rebuilding.code(asked.index, tuple(states))
        with rerunning():
            found = code.run(asked.start, here, _is_compact, self._noted)
            for number, those in waiting.items():
                for one in those:
                    one.held = found.get(number)
            result = found.get(asked.number)
            if result is None:  # kept in fewer bytes
                result = asked.start(asked.number).detach()
            execution_context.count("num_rederived", self._counts)
            return laid(result, asked.geometry)

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

    def start(self, number: int) -> torch.Tensor:
        """Returns what its rebuild starts from: what a source keeps, or a parameter."""
        step = self._step
        place = step.rebuilding.places[self.index].get(number)
        return constant_of(step.constants[number]) if place is None else self.sources[place].contents()

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


def _is_compact(number: int) -> bool:
    """Whether a value that is written over was made anew when it was read: none is, but those that ops made."""
    return False
