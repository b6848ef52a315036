"""Where a step that follows a program enters and leaves patched modules, and between which of these nobody watches.

[Note: idle stretches]
1. Most calls of a loose plan lead to nothing that is rebuilt. While such calls run, neither the torch-function mode nor
   the saved-tensor hooks are on, and autograd keeps what it saves by itself: the model runs as it does without a plan.
2. Watched are the calls whose ops run again, those that return or save a value that is held or rebuilt, and those that
   are the first to read a parameter that something is rebuilt from. What is rebuilt rests on these calls alone.
3. Modes go on and off where a patched module is entered or left: a stretch between two such boundaries is idle if no
   call in it is watched. Nobody is told of a module at whose ends nothing goes on or off, as long as it is among those
   that this part of the step had. Where a call differs, the record enters the modules that are open then.
4. Of a call that is not watched, between others that are, only the function is compared.
5. A tensor that such a call or an idle stretch returns is new to the step: its metadata are compared where it is read.
6. In neither does anybody see a held tensor written to; its version tells later. Where autograd has saved the tensor
   too, plain training raises as well. So nothing is idle once a tensor is held that autograd does not save.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from recoup.runtime.rebuild.step_program import Boundary, ProgramCall
from recoup.runtime.rebuild.values import Value


@dataclasses.dataclass(frozen=True, slots=True)
class Passed:
    """What was noted at a boundary.

    Attributes:
        path: of the module that is entered, None where one is left.
        num_calls, num_saves: before it.
        deriving: as the recorder's.
        is_top: whether no function mode but ours is on.
    """

    path: str | None
    num_calls: int
    num_saves: int
    deriving: bool
    is_top: bool


class Rests:
    """What is rebuilt rests on the calls of a step that are noted here.

    Attributes:
        orders: of the ops that run again. values: what these read and make, and what is held or rebuilt.
        functions: whose calls are watched for another reason.
    """

    def __init__(self) -> None:
        self.orders: set[int] = set()
        self.values: set[Value] = set()
        self.functions: tuple[Any, ...] = ()
        self._made_until: list[int] = []
        self._returned: list[list[Value]] = []

    def returned(self, num_made: int, values: Iterable[Value | None]) -> None:
        """Called when a call has returned these, and so many ops were recorded since the step began."""
        self._made_until.append(num_made)
        self._returned.append([value for value in values if value is not None])

    def call_of(self, order: int) -> int:
        """Returns the index of the call in which an op was recorded."""
        return bisect.bisect_left(self._made_until, order)

    def on(self, calls: Sequence[ProgramCall], seen: Collection[int]) -> set[int]:
        """Returns the indices of the calls that have to be watched; `seen` as `Idle`'s."""
        found = {self.call_of(order) for order in self.orders}
        places = sorted(seen)
        for i, (call, values) in enumerate(zip(calls, self._returned, strict=True)):
            is_hooked = _any_between(places, call.first_save, call.last_save)
            holds = call.keeps or call.keeps_results or call.reads_constants or call.draws
            if is_hooked or holds or call.func in self.functions or not self.values.isdisjoint(values):
                found.add(i)
        return found


class Idle:
    """The idle stretches of a step.

    Attributes:
        boundaries: of the program. stay: indices of the calls that are not in idle stretches.

    Args:
        calls: all of the step's. passed: its boundaries. watched: indices of the calls that have to be.
        seen: places of the saved tensors that the hooks are to see. end: from this call on, all have to be watched.
    """

    def __init__(
        self,
        calls: Sequence[ProgramCall],
        passed: Sequence[Passed],
        watched: Collection[int],
        seen: Collection[int],
        end: int,
    ) -> None:
        self._num_calls = num_calls = [p.num_calls for p in passed] + [len(calls)]
        saves = [p.num_saves for p in passed] + [calls[-1].last_save if calls else 0]
        needed, places = sorted(watched), sorted(seen)
        is_on = [
            stop > end or _any_between(needed, start, stop) or _any_between(places, first, last)
            for (start, stop), (first, last) in zip(
                itertools.pairwise(num_calls), itertools.pairwise(saves), strict=True
            )
        ]
        _join(is_on, passed, num_calls)
        ops = list(itertools.accumulate([call.num_ops for call in calls], initial=0))
        self.stay = list(range(num_calls[0]))
        self.boundaries: list[Boundary] = []
        before = 0
        for p, stop, on in zip(passed, num_calls[1:], is_on, strict=True):
            num_ops = ops[p.num_calls] - ops[before]
            self.boundaries.append(Boundary(p.path, num_ops=num_ops, deriving=p.deriving, is_watched=on))
            before = p.num_calls
            if on:
                self.stay += range(p.num_calls, stop)
        for i in self.stay:
            if i < end and i not in watched:
                calls[i].loosen()
        _choose_told(self.boundaries)

    def place(self, calls: Sequence[ProgramCall]) -> None:
        """Notes before which of the calls that stay each boundary lies; `calls` has what is behind the last, too."""
        for boundary, num_calls in zip(self.boundaries, self._num_calls, strict=False):
            boundary.call = calls[bisect.bisect_left(self.stay, num_calls)]

    def begin(self, index: int) -> Boundary | None:
        """Returns where the idle stretch begins that a call lies in, None if it is watched."""
        place = bisect.bisect_right(self._num_calls[:-1], index) - 1
        if place < 0 or self.boundaries[place].is_watched:
            return None
        while place and not self.boundaries[place - 1].is_watched:
            place -= 1
        return self.boundaries[place]


def _choose_told(boundaries: Sequence[Boundary]) -> None:
    """Decides of which modules somebody is told: of those at whose ends something goes on or off."""
    ends: dict[int, int] = {}
    entered: list[int] = []
    before = True
    for at, boundary in enumerate(boundaries):
        boundary.is_told = boundary.is_watched is not before
        before = boundary.is_watched
        if boundary.path is not None:
            entered.append(at)
        elif entered:
            ends[entered.pop()] = at
    for first, last in ends.items():
        boundaries[first].is_told = boundaries[last].is_told = boundaries[first].is_told or boundaries[last].is_told
    awaited: str | bool | None = None
    for at, boundary in reversed([*enumerate(boundaries)]):
        if at in ends and boundary.path == awaited:  # an earlier call of the module than the one that is awaited
            boundary.is_told = boundaries[ends[at]].is_told = True
        if boundary.is_told:
            awaited = boundary.path


def _any_between(places: Sequence[int], start: int, stop: int) -> bool:
    at = bisect.bisect_left(places, start)
    return at < len(places) and places[at] < stop


def _join(is_on: list[bool], passed: Sequence[Passed], num_calls: Sequence[int]) -> None:
    """Has modes on in stretches without a call, and in those that begin or end where they cannot be put off or on."""
    before: list[bool] = []
    while before != is_on:
        before = list(is_on)
        start = 0
        for on, group in itertools.groupby(before):
            stop = start + len(list(group))
            ends = [at for at in (start, stop) if at < len(passed)]
            is_empty = num_calls[stop] == num_calls[start]
            if not on and (is_empty or not all(passed[at].is_top for at in ends)):
                is_on[start:stop] = [True] * (stop - start)
            start = stop


def read_anew(calls: Sequence[ProgramCall], constants: Collection[int]) -> None:
    """Has calls read as new to the step what none of them returned.

    Args:
        calls: those that stay. constants: slots of parameters.
    """
    known = set(constants)
    for call in calls:
        reads: list[int] = list(call.reads)
        enters: list[Any] = list(call.enters)
        for i, slot in enumerate(reads):
            if slot >= 0 and slot not in known:
                reads[i] = -1
                enters.append((i, slot))
        call.reads, call.enters = reads, enters
        call.binds = -1 in reads
        known.update(slot for _, slot in (*enters, *call.gives))
        known.update(view[1] for view in call.views)
