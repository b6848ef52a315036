"""Learns the program of a step while it is recorded, see [Note: step programs]."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

from recoup import _torch
from recoup.runtime.rebuild.boundaries import Idle, Passed, Rests, read_anew
from recoup.runtime.rebuild.call_forms import CallForm
from recoup.runtime.rebuild.call_log import CallLog
from recoup.runtime.rebuild.kept import Kept, KeptConstant, KeptView
from recoup.runtime.rebuild.op_forms import Noted
from recoup.runtime.rebuild.saved_apart import Apart
from recoup.runtime.rebuild.segment_program import NotedSegment, RebuiltSave, SegmentProgram, is_slight
from recoup.runtime.rebuild.segments import Rebuilt, Segment
from recoup.runtime.rebuild.slots import Slots, memory_of
from recoup.runtime.rebuild.step_program import (
    CONSTANT,
    KEEP,
    REBUILD,
    ProgramCall,
    Saved,
    StepProgram,
    last_uses,
    parts_of,
)
from recoup.runtime.rebuild.values import Geometry, Value, geometry_of
from recoup.thresholds import SMALL_BYTES

_Segments = dict[Segment, NotedSegment]


class Learning:
    """Notes a step while it is recorded.

    Attributes:
        failed: it can have no program. is_open: a call runs. keeps_lists: what is small and made of nothing is held.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self.failed = self.keeps_lists = False
        self._calls: list[ProgramCall] = []
        self._saves: list[tuple[Any, Value | None, Geometry]] = []
        self._slots = Slots()
        self._constants: list[tuple[nn.Parameter, int]] = []
        self._numbers: dict[Value, int] = {}
        self._seen: dict[Value, tuple[int, bool, int]] = {}  # where first: call, whether a result, position
        self._is_inside = self.is_open = False  # a call runs: with a form; any
        self._apart = Apart()
        self._latest: list[RebuiltSave] = []  # saved since the call began
        self._before: list[RebuiltSave] = []  # in the call before it
        self._written: list[Value] = []
        self._num_written, self._values_now = 0, list[Value | None]()  # before the call that runs, of what it is handed
        self._of_others: set[Value] = set()  # results of calls without form
        self._handed_now: Sequence[Any] = ()  # to the call that runs
        self._casts: set[int] = set()
        self._shown: dict[Value, int] = {}  # random masks, by which saved tensor
        self._passed: list[Passed] = []
        self._may_rest = _torch.saves_plainly()  # nobody else's hooks are on
        self._rests = Rests()

    def begin(self, func: Any, form: CallForm | None, tensors: Sequence[Any]) -> ProgramCall:
        """Called before a call runs; returns its note."""
        self.failed = self.failed or self.is_open  # the call before has raised
        reads: list[int] = []
        index = len(self._calls)
        call = ProgramCall(func, form, reads)
        call.has_grad = torch.is_grad_enabled()
        enters = []
        self._values_now = [*map(self._recorder.existing, tensors)]
        for i, (tensor, value) in enumerate(zip(tensors, self._values_now, strict=True)):
            slot = self._slots.of(tensor)
            if slot is None:
                is_met, slot = self._slots.has_met(tensor), self._slots.give(tensor)
                if is_met:
                    self.failed = True  # the next step's need not lie over that memory
                if type(tensor) is nn.Parameter:
                    self._constants.append((tensor, slot))
                else:
                    if value is not None and value.made is not None and value not in self._of_others:
                        self.failed = True  # a view that no call returned
                    enters.append((i, slot))
                    slot = -1
            reads.append(slot)
        call.binds = bool(enters)
        call.enters = enters
        call.first_save = len(self._saves)
        self._look_again()
        self._before, self._latest = self._latest, []
        self._calls.append(call)
        self._see(index, False, enumerate(self._values_now))
        self._slots.meet(tensors)
        self._handed_now = tensors
        self._is_inside = form is not None
        self.is_open = True
        return call

    def end(self, out: Any, num_ops: int) -> None:
        """Called when it has returned."""
        call = self._calls[-1]
        items = enumerate(out) if isinstance(out, (tuple, list)) else [(-1, out)]
        outs = [(i, item) for i, item in items if isinstance(item, torch.Tensor)]
        if call.form is None:  # how that lies does not follow from the call: looked at here, or where it is read first
            new = [(i, t) for i, t in outs if self._slots.of(t) is None]
            over = [(i, t, memory_of(t, [*self._handed_now, *[t for _, t in outs]])) for i, t in new]
            views = [(i, t, at) for i, t, at in over if at is not None]
            call.views = [(i, self._slots.give(t), at, (geometry_of(t), t.requires_grad)) for i, t, at in views]
            others = [self._recorder.existing(t) for i, t, at in over if at is None]
            self._of_others.update(v for v in others if v is not None)
        else:
            call.gives = [(i, self._slots.give(t)) for i, t in outs if self._slots.of(t) is None]
            self._slots.meet([t for _, t in outs])
        call.num_ops = num_ops
        call.end_save = len(self._saves)
        call.deriving = self._recorder.deriving
        index = len(self._calls) - 1
        values = [self._recorder.existing(t) for _, t in outs]  # of what it was handed and wrote to, the new ones
        self._rests.returned(self._recorder.num_made, values)
        self._see(index, True, zip([i for i, _ in outs], values, strict=True))
        self._is_inside = self.is_open = False
        self._handed_now = ()

    def passes(self, path: str | None) -> None:
        """Called where a patched module is entered, and, without its path, where one is left."""
        is_top = not _torch.has_user_function_modes()
        self._passed.append(Passed(path, len(self._calls), len(self._saves), self._recorder.deriving, is_top))

    def begin_unknown(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Called before a call runs of which it is seen afterwards whether it has a form; `settle` is told."""
        self._num_written = len(self._written)
        handed, scalars = parts_of(args, kwargs)
        tensors = list({id(tensor): tensor for tensor in handed}.values())
        call = self.begin(func, None, tensors)
        call.scalars = scalars
        call.note_items(args, kwargs, tensors)
        self._handed_now = handed

    def settle(self, form: CallForm | None, log: CallLog | None) -> None:
        """Called when it has returned, with its form and what was noted of its ops."""
        call, handed = self._calls[-1], self._handed_now
        call.form = form
        if form is not None and log is not None:
            log.note_ops()
            values = log.values_before(list({id(t): t for t in handed}.values()), self._values_now, self._recorder)
            self._see(len(self._calls) - 1, False, enumerate(values))
            written = [values[position] for position, _ in form.written]
            if not form.passing:  # what it writes over inside of itself is saved in no other way
                self._written[self._num_written :] = [v for v in written if v is not None]
            self._apart.drop(call.first_save)
            self._casts.update(call.first_save + position for position in form.casts)
            return
        places = {id(tensor): i for i, tensor in reversed([*enumerate(handed)])}
        firsts = sorted(places.values())  # where each tensor is handed first
        call.reads = [call.reads[firsts.index(places[id(tensor)])] for tensor in handed]
        call.enters = [(firsts[i], slot) for i, slot in call.enters]
        for at, (kind, _, geometry) in enumerate(self._saves[call.first_save :], call.first_save):
            if not isinstance(kind, RebuiltSave):
                self.failed = self.failed or kind not in (Kept, KeptView, KeptConstant)
                self._saves[at] = Kept, None, geometry

    def watch(self, func: Any) -> None:
        """Has calls of a function lie in no idle stretch."""
        self._rests.functions += (func,)

    def is_written(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called before an op that is seen writes to tensors."""
        if self._is_inside or not self.is_open:
            self.failed = True
        self.writes(tensors)

    def writes(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called before tensors are written to."""
        self._written += [v for v in map(self._recorder.existing, tensors) if v is not None]

    def casts(self) -> None:
        """Called before a tensor is packed that autocast made of a parameter."""
        self._casts.add(len(self._saves))

    def shows(self, mask: Value) -> None:
        """Called before a tensor is packed that shows a random mask."""
        self._shown[mask] = len(self._saves)

    def saved(self, tensor: torch.Tensor, value: Value | None, packed: Any) -> None:
        """Called when a tensor was packed."""
        self._look_again()
        kind: Any = type(packed)
        if kind is Rebuilt:
            kind = RebuiltSave(packed)
            self._latest.append(kind)
        if not self._is_inside and type(packed) is Rebuilt:
            self._apart.note(len(self._saves), tensor, self._slots.over(tensor))
        elif not self.is_open:  # in a call, `settle` sees to it
            self.failed = self.failed or kind not in (Kept, KeptView, KeptConstant)
            kind, value = Kept, None
        self._saves.append((kind, value, geometry_of(tensor)))

    def _look_again(self) -> None:
        """The next op may have begun, and with it a segment that rebuilds what was saved for it."""
        for save in (*self._before, *self._latest):
            save.look()

    def _see(self, index: int, is_result: bool, values: Iterable[tuple[int, Value | None]]) -> None:
        for position, value in values:
            if value is not None:
                self._seen.setdefault(value, (index, is_result, position))

    def _number(self, value: Value) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def program(self) -> StepProgram | None:
        """Returns the program of the step that was noted, None if it has none."""
        if self.failed or self.is_open:
            return None
        segments: dict[Segment, NotedSegment] = {}
        saves: list[Saved] = []
        for kind, value, geometry in self._saves:
            if isinstance(kind, RebuiltSave):
                kind.look()
                if (around := kind.segment.around) is not None:
                    noted = segments.setdefault(around, NotedSegment(len(segments)))
                    noted.held.update(kind.held_around)
                    for start in kind.segment.starts:
                        noted.asked.setdefault(start, []).append(cast(Geometry, start.base))
                noted = segments.setdefault(kind.segment, NotedSegment(len(segments)))
                noted.held.update(kind.held)
                noted.asked.setdefault(kind.value, []).append(kind.geometry)
                own = None if kind.value.base == kind.geometry else kind.geometry
                saves.append((REBUILD, noted.number, self._number(kind.value), own))
            elif kind is Kept or kind is KeptView:
                number = -1 if value is None or value.constant is not None else self._number(value)
                saves.append((KEEP, -1, number, geometry))
            elif kind is KeptConstant:
                saves.append((CONSTANT, -1, -1, None))
            else:
                return None
        rebuilt = {number for kind, _, number, _ in saves if kind == REBUILD}
        ahead: set[Value] = set()  # what is written over is rebuilt from nowhere: what is made of it is kept, if slight
        while True:
            programs = [self._segment(segment, segments, ahead) for segment in segments]
            found = [p for p in programs if p is not None]
            starts = {n for p in found for n in p.sources | p.constants}
            over = {v for v in self._written if self._numbers.get(v, -1) in starts | rebuilt}
            if over <= ahead:
                break
            ahead |= over
        if over or len(found) < len(programs):  # it raises in backward, as plain would
            return None
        kept_numbers = {number for kind, _, number, _ in saves if kind == KEEP}
        if not self._place(found, kept_numbers):
            return None
        shown = {at: self._numbers.get(mask, -1) for mask, at in self._shown.items()}
        masks = {at: n for at, n in shown.items() if n in starts and saves[at][2] != n}
        # What a call keeps needs no hook where autograd saves it, but to have what is written to later copied in time.
        by_calls = {n for call in self._calls for _, n in (*call.keeps, *call.keeps_results)}
        by_calls -= {n for value, n in self._numbers.items() if value.is_passing} | {n for p in found for n in p.narrow}
        asked = starts - by_calls
        saves = [(k, s, n if k != KEEP or n in asked else -1, g) for k, s, n, g in saves]
        last = last_uses(saves, found)
        seen = {at for at, (kind, _, number, _) in enumerate(saves) if kind == REBUILD or number >= 0}
        seen |= self._casts | masks.keys()
        numbered = starts | rebuilt
        self._rests.values.update(value for value, number in self._numbers.items() if number in numbered)
        held = [{n for _, n in (*call.keeps, *call.keeps_results)} for call in self._calls]
        end = next((i for i, numbers in enumerate(held) if not numbers <= kept_numbers), len(held))
        first_saves = [call.first_save for call in self._calls]
        idle = self._let_go(seen, end)
        apart = self._apart.placed(self._calls)
        if apart is None:
            return None
        self._let_held_go(last, first_saves, idle)
        values = [value.without_history() for value in self._numbers]
        parts = values, self._slots.num, self._constants, masks, frozenset(self._casts), frozenset(seen)
        program = StepProgram(self._calls, saves, found, *parts, idle.boundaries, apart)
        idle.place([*program.calls, program.end])
        return program

    def _segment(self, segment: Segment, noted: _Segments, ahead: set[Value]) -> SegmentProgram | None:
        """Returns how a segment is rebuilt, None if something that it starts from cannot be held."""
        wanted, held = noted[segment].asked, noted[segment].held
        program = SegmentProgram(-1 if segment.around is None else noted[segment.around].number)
        ops: dict[int, tuple[Noted, set[Value]]] = {}
        stack, seen = list(wanted), set(wanted)
        while stack:
            value = stack.pop()
            number = self._number(value)
            if value.constant is not None:
                program.constants.add(number)
                continue
            if value.base is not None:
                program.bases[number] = value.base
            if value in held:
                if held[value] is not Kept:
                    if value not in self._shown:
                        return None
                    program.narrow.add(number)
                program.sources.add(number)
                continue
            if value.base is None:
                return None
            if value in segment.starts:
                program.starts.add(number)
                continue
            made = value.made if type(value.made) is Noted else None
            if made is None and not is_slight(value.base):
                return None
            is_list = self.keeps_lists and made is not None and not made.values and value in self._seen
            is_kept = value in self._seen and is_slight(value.base)
            if (
                made is None
                or (is_list and value.num_bytes() <= SMALL_BYTES)
                or (is_kept and not ahead.isdisjoint(made.values))
            ):
                # Made by a call without form, from nothing (`arange`), or from indices that are written over.
                program.sources.add(number)
                continue
            ops.setdefault(made.order, (made, set()))[1].add(value)
            self._rests.orders.add(made.order)
            self._rests.values.update((value, *made.values))
            for read in made.values:
                if read not in seen:
                    seen.add(read)
                    stack.append(read)
        for order in sorted(ops):
            made, results = ops[order]
            gives = tuple(sorted([(value.output, self._number(value)) for value in results]))
            program.ops.append((made.form, tuple([self._number(read) for read in made.values]), gives))
            program.calls.append(self._calls[self._rests.call_of(order)])
        program.asked = {self._number(value): geometries for value, geometries in wanted.items()}
        return program

    def _place(self, segments: list[SegmentProgram], kept: set[int]) -> bool:
        """Has what segments start from held at the call where it is first met; whether each is met.

        Args:
            kept: numbers of what is kept where autograd saves it, which is early enough for what no call returns.
        """
        by_number = {number: value for value, number in self._numbers.items()}
        for attribute, numbers in (
            ("sources", {n for s in segments for n in s.sources}),
            ("constants", {n for s in segments for n in s.constants}),
        ):
            for number in sorted(numbers):
                value = by_number[number]
                where = self._seen.get(value)
                if where is None and (value in self._shown or (number in kept and attribute == "sources")):
                    continue
                if where is None:
                    return False
                index, is_result, position = where
                call = self._calls[index]
                name = "reads_constants" if attribute == "constants" else "keeps_results" if is_result else "keeps"
                if attribute == "constants" and is_result:
                    return False
                setattr(call, name, (*getattr(call, name), (position, number)))
        return True

    def _let_go(self, seen: Collection[int], end: int) -> Idle:
        """Drops the calls of idle stretches, and notes after which of the others nobody reads a slot any more.

        Args:
            seen, end: as `Idle`'s.
        """
        self._apart.drop_others(seen)
        num_saved = len(self._saves)
        for call in reversed(self._calls):
            call.last_save, num_saved = num_saved, call.first_save
        watched = self._rests.on(self._calls, seen)
        idle = Idle(self._calls, self._passed, watched, seen, end if self._may_rest else 0)
        self._calls = [self._calls[i] for i in idle.stay]
        here_read = {slot for call in self._calls for slot in call.reads}
        self._constants = [(parameter, slot) for parameter, slot in self._constants if slot in here_read]
        always = {slot for _, slot in self._constants}
        read_anew(self._calls, always)
        read: set[int] = set()
        for call in reversed(self._calls):
            self._apart.read_in(call, read)
            here = [slot for slot in call.reads if slot >= 0 and slot not in always]
            call.gives = tuple([(i, slot) for i, slot in call.gives if slot in read])
            call.views = tuple([view for view in call.views if view[1] in read])
            call.enters = tuple([(i, slot) for i, slot in call.enters if slot in read])
            call.leaves = tuple({slot for slot in here if slot not in read})
            read.update(here)
            call.reads = tuple(call.reads)
        return idle

    def _let_held_go(self, last: dict[int, int], first_saves: list[int], idle: Idle) -> None:
        """Notes after which call nobody asks for a held value any more, but who was given it before."""
        by_number = {number: value for value, number in self._numbers.items()}
        for number, saved in last.items():
            seen = self._seen.get(by_number[number])
            after = max(bisect.bisect_right(first_saves, saved), 0 if seen is None else seen[0] + 1)
            if after < len(first_saves):
                place = idle.begin(after) or self._calls[bisect.bisect_left(idle.stay, after)]
                place.leaves = (*place.leaves, self._slots.num + number)
