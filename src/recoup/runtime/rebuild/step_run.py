"""A step that is held against the program of an earlier one, see [Note: step programs]."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from recoup import _torch
from recoup.runtime import execution_context
from recoup.runtime.rebuild.constant import Constant
from recoup.runtime.rebuild.kept import Kept, KeptConstant, KeptView, laid
from recoup.runtime.rebuild.lineage import Value, geometry_of
from recoup.runtime.rebuild.rederived import fitted, paused
from recoup.runtime.rebuild.segments import Rebuilt, Segment, Wanted, has_memory, parameter_of
from recoup.runtime.rebuild.step_program import CONSTANT, REBUILD, ProgramCall, SegmentProgram, StepProgram, parts_of


class SegmentRun:
    """A segment of a step that follows a program: what `Segment` is to a record.

    Attributes:
        pending: as `Segment`'s. sources: what keeps the values that it starts from, by number.

    Args:
        around: the run of the segment that this is a piece of. values: by number.
    """

    __slots__ = ("__weakref__", "_constants", "_counts", "_program", "_starts", "pending", "sources")

    def __init__(
        self, program: SegmentProgram, constants: dict[int, Constant], around: SegmentRun | None, values: list[Value]
    ) -> None:
        self._counts = execution_context.current_counts()
        self._program = program
        self._constants = constants
        self.pending: set[weakref.ref[Wanted]] = set()
        self.sources: dict[int, Kept] = {}
        self._starts: dict[int, Wanted] = {}
        if around is not None:
            self._starts = {number: Wanted(values[number], around, number) for number in program.starts}

    def rebuild(self, asked: Wanted) -> None:
        """Has everybody who waits hold the contents asked for, by running what leads to them."""
        waiting = [asked]
        for ticket in tuple(self.pending):
            wanted = ticket()
            if wanted is not None and wanted is not asked and wanted.held is None:
                waiting.append(wanted)
        with _torch.below_autocast_and_autograd(), execution_context.recomputing(), paused():
            found = self._run(frozenset([wanted.number for wanted in waiting]))
            for wanted in waiting:
                tensor = found.get(wanted.number)
                if tensor is None:  # held by itself
                    start = self._start(wanted.number)
                    tensor = start if wanted.value.base is None else laid(start, wanted.value.base)
                wanted.held = tensor
        execution_context.count("num_rederived", self._counts, len(waiting))

    def _run(self, wanted: frozenset[int]) -> dict[int, torch.Tensor]:
        here = {number: start.take() for number, start in self._starts.items()}
        bases = self._program.bases
        for form, reads, gives, drops in self._program.leading_to(wanted):
            tensors: list[torch.Tensor] = []
            tensor: torch.Tensor | None = None
            for number, geometry in reads:
                tensor = here.get(number)
                if tensor is None:
                    tensor = here[number] = self._start(number)
                tensors.append(tensor if geometry is None else laid(tensor, geometry))
            out = form.run(tensors)
            del tensors
            tensor = None
            as_then = form.gave(out)
            for position, number in gives:
                result = out if form.is_single else out[position]
                here[number] = result if as_then else fitted(result, bases[number])
                del result
            del out
            for number in drops:
                here.pop(number, None)
        return here

    def _start(self, number: int) -> torch.Tensor:
        kept = self.sources.get(number)
        if kept is not None:
            return kept.contents().detach()
        return parameter_of(self._constants[number])


class StepRun:
    """Follows a program through a step.

    Attributes:
        is_on: until a call is another than the program's.
    """

    __slots__ = (
        "_at",
        "_constants",
        "_end",
        "_kept",
        "_num_saved",
        "_program",
        "_segments",
        "_slots",
        "_under",
        "is_on",
    )

    def __init__(self, program: StepProgram, slots: list[Any], recorder: Any) -> None:
        self._program = program
        self._slots = slots
        self._under = recorder.surroundings()
        self._at = self._num_saved = 0
        self._end = program.calls[0].first_save if program.calls else 0
        self._kept: dict[int, Kept] = {}
        self._constants: dict[int, Constant] = {}
        self._segments: dict[int, SegmentRun] = {}
        self.is_on = True

    @property
    def is_done(self) -> bool:
        """Whether the program was followed to its end."""
        return self.is_on and self._at == len(self._program.calls)

    def next_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> ProgramCall | None:
        """Returns the call that is about to run if it is the program's next; else None, and the program is over."""
        calls = self._program.calls
        at = self._at
        if at == len(calls) or (call := calls[at]).func is not func or self._num_saved != call.first_save:
            return None
        form = call.form
        if form is None:
            handed, scalars = parts_of(args, kwargs)
            if scalars != call.scalars or len(handed) != len(call.reads) or not self._are_read(call, handed):
                return None
            for slot in call.leaves:
                self._slots[slot] = None
            self._take(call, handed)
            self._at = at + 1
            self._end = call.end_save
            return call
        tensors = form.tensors(args, kwargs) if call.binds else form.alike(args, kwargs)
        if tensors is None:
            return None
        slots = self._slots
        for tensor, slot in zip(tensors, call.reads, strict=True):
            if slot >= 0 and slots[slot] is not tensor:
                return None
        for position, number in call.reads_constants:
            tensor = tensors[position]
            if number not in self._constants:
                parameter = tensor if isinstance(tensor, torch.nn.Parameter) else tensor._base  # or a view of one
                if not isinstance(parameter, torch.nn.Parameter) or not has_memory(parameter):
                    return None
                constant = self._constants[number] = Constant(parameter)
                constant.is_source = True
        for slot in call.leaves:
            slots[slot] = None
        if call.enters or call.keeps:
            self._take(call, tensors)
        self._at = at + 1
        self._end = call.end_save
        return call

    def _are_read(self, call: ProgramCall, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the very tensors that the call reads."""
        slots = self._slots
        for tensor, slot in zip(tensors, call.reads, strict=True):
            if slot >= 0 and slots[slot] is not tensor:
                return False
        return True

    def _take(self, call: ProgramCall, tensors: Sequence[torch.Tensor]) -> None:
        """Notes what a call is handed."""
        for position, slot in call.enters:
            self._slots[slot] = tensors[position]
        for position, number in call.keeps:
            self._keep(number, tensors[position])

    def returned(self, call: ProgramCall, out: Any) -> None:
        """Called when a call of the program has returned."""
        for position, slot in call.gives:
            self._slots[slot] = out if position < 0 else out[position]
        for position, number in call.keeps_results:
            self._keep(number, out if position < 0 else out[position])
        self._end = call.last_save

    def pack(self, recorder: Any, tensor: torch.Tensor) -> Any | None:
        """Returns what autograd gets instead of a tensor; None if the program has nothing saved here."""
        at = self._num_saved
        if at >= self._end:
            recorder.stop_program()
            return None
        self._num_saved = at + 1
        kind, segment, number, geometry = self._program.saves[at]
        if kind == CONSTANT:
            return KeptConstant(tensor)
        recorder.turn += 1
        if kind == REBUILD:
            value = self._program.values[number]
            wanted = geometry or value.base
            assert wanted is not None
            return Rebuilt(value, wanted, self._segment(segment), self._under, number)
        if number < 0:
            return Kept(tensor)
        kept = self._kept.get(number)
        if kept is None:
            kept = Kept(tensor)
            self._own(number, kept)
            return kept
        assert geometry is not None
        return kept if geometry_of(kept.tensor) == geometry else KeptView(kept, geometry)

    def _segment(self, index: int) -> SegmentRun:
        found = self._segments.get(index)
        if found is None:
            program = self._program
            segment = program.segments[index]
            around = None if segment.around < 0 else self._segment(segment.around)
            found = self._segments[index] = SegmentRun(segment, self._constants, around, program.values)
        return found

    def _keep(self, number: int, tensor: torch.Tensor) -> None:
        if number not in self._kept:
            with _torch.past_dispatch_modes():
                self._own(number, Kept(_torch.alias_below_autograd(tensor)))

    def _own(self, number: int, kept: Kept) -> None:
        self._kept[number] = kept
        for segment in self._program.holders.get(number, ()):
            kept.is_source = True
            self._segment(segment).sources[number] = kept

    def end(self, recorder: Any) -> None:
        """Ends the program before its time: what it holds is made known to the record."""
        self.is_on = False
        for kept in self._kept.values():
            value = Value()
            value.kept = weakref.ref(kept)
            recorder.set_value(kept.tensor, value)
        recorder.segment = Segment()
        if self._at:
            recorder.deriving = self._program.calls[self._at - 1].deriving
