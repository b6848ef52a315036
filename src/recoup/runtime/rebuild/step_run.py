"""A step that follows the program of an earlier one as long as their calls are equal, see [Note: step programs]."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from recoup import _torch
from recoup.ir.decision import OpMark
from recoup.runtime.rebuild.constant import Constant
from recoup.runtime.rebuild.dynamic_shapes import Layout, Varied
from recoup.runtime.rebuild.kept import Kept, KeptCompact, kept_simply, kept_with_its_node
from recoup.runtime.rebuild.rerun import has_memory
from recoup.runtime.rebuild.saved_tensor import compact, keep, pack
from recoup.runtime.rebuild.segment_program import Wish
from recoup.runtime.rebuild.segment_run import Lists, SegmentRun, Waiting
from recoup.runtime.rebuild.step_program import (
    CONSTANT,
    REBUILD,
    Boundary,
    ProgramCall,
    StepProgram,
    parts_of,
)
from recoup.runtime.rebuild.values import Value, geometry_of, share_storage
from recoup.runtime.recompute.spot_check import spots_of

_num_function_modes = _torch.num_function_modes  # asked for every saved tensor


class StepRun:
    """Follows a program through a step.

    Attributes:
        is_on: until a call is another than the program's. call, boundary: those that should come next.
        slots: what was handed from call to call. constants: parameters that something is rebuilt from, by number.
        noted: layouts and numbers of this step, see [Note: dynamic shapes].
        num_saved: tensors that autograd has saved; it may save until `end`, -1 once the program has ended.
    """

    __slots__ = (
        "_apart",
        "_casts",
        "_draws",
        "_first_leaf",
        "_handed",
        "_kept",
        "_leaves",
        "_lists",
        "_masks",
        "_packs",
        "_program",
        "_recorder",
        "_segments",
        "_spots",
        "_under",
        "boundary",
        "call",
        "constants",
        "end",
        "is_on",
        "noted",
        "num_saved",
        "slots",
    )

    def __init__(self, program: StepProgram, slots: list[Any], recorder: Any) -> None:
        self._program = program
        self._masks = program.masks
        self._casts = program.casts
        self._apart = program.apart
        self._packs = program.packs
        self._spots = program.spots
        self.slots = slots
        self._under = recorder.surroundings()
        self.call = program.calls[0] if program.calls else program.end
        self.boundary: Boundary = program.first
        self.num_saved = 0
        self.end = self.call.first_save
        self._recorder = recorder
        self._handed: Sequence[torch.Tensor] = ()
        self._kept: dict[int, weakref.ref[Any]] = {}
        self._leaves: dict[Value, None] = {}  # that ops of the call which runs now have read, those it was handed first
        self._draws: dict[int, int] = {}
        self._first_leaf = 0
        self.constants: dict[int, Constant] = {}
        self._segments: dict[int, SegmentRun] = {}
        self._lists: Lists = {}
        self.noted: dict[int, Any] = {}
        self.is_on = True

    @property
    def is_done(self) -> bool:
        """Whether the program was followed to its end."""
        return self.is_on and self.call is self._program.end and self.boundary.then is None

    def next_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> ProgramCall | None:
        """Returns the call that is about to run if it is the program's next; else None, and the program is over."""
        call = self.call
        if call.func is not func or call.then is None or call.has_grad is not torch.is_grad_enabled():
            return None
        form = call.form
        if form is None:
            handed, scalars = parts_of(args, kwargs)
            if scalars != call.scalars or len(handed) != len(call.reads) or not self._are_read(call, handed):
                return None
            for slot in call.leaves:
                self.slots[slot] = None
            self._take(call, handed)
            self._handed = handed if call.views else ()
            self.call = call.then
            self.end = call.end_save
            return call
        tensors = form.tensors(args, kwargs) if call.binds else form.alike(args, kwargs)
        if tensors is None:
            return None
        if not self._are_read(call, tensors) or not self.takes(call, tensors):
            return None
        for slot in call.leaves:
            self.slots[slot] = None
        if call.enters:
            self._take(call, tensors)
        self.call = call.then
        self.end = call.end_save
        return call

    def takes(self, call: ProgramCall, tensors: Sequence[torch.Tensor]) -> bool:
        """Notes what later rebuilds start from of a call's tensors; whether they can."""
        for position, number in call.reads_constants:
            if number not in self.constants and not self.reads_constant(number, tensors[position]):
                return False
        return all([self.keeps(number, tensors[position]) for position, number in call.keeps])

    def reads_constant(self, number: int, tensor: torch.Tensor) -> bool:
        """Notes a parameter that something is rebuilt from, or what is a view of one; whether that can be."""
        spots = self._spots.get(number)
        sample = None if spots is None else spots.look_at(tensor)
        if sample is None:
            parameter = tensor if isinstance(tensor, torch.nn.Parameter) else tensor._base
            if not isinstance(parameter, torch.nn.Parameter) or not has_memory(parameter):
                return False
            tensor, self._spots[number] = parameter, spots_of(parameter)
            spots = self._spots[number]
            sample = None if spots is None else spots.look_at(parameter)
        self.constants[number] = constant = Constant(tensor, spots, sample)
        constant.is_source = True
        return True

    def meets(self, call: ProgramCall, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a call's tensors, of which some are new to the step, are as they were."""
        form = call.form
        assert form is not None
        if not call.kinds:
            return form.fits(tensors)
        is_kind = form.is_kind is not None and form.is_kind(*tensors)
        return is_kind and all([geometry_of(tensors[i]) == kind for i, kind in call.kinds.items()])

    def lies(self, layout: Layout, tensor: torch.Tensor) -> bool:
        """Notes how an op that runs again reads a tensor; whether it can."""
        geometry = layout.of(tensor)
        if geometry is None:
            return False
        self.noted[layout.index] = geometry
        return True

    def _are_read(self, call: ProgramCall, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the very tensors that the call reads."""
        slots = self.slots
        for tensor, slot in zip(tensors, call.reads, strict=True):
            if slot >= 0 and slots[slot] is not tensor:
                return False
        return True

    def _take(self, call: ProgramCall, tensors: Sequence[torch.Tensor]) -> None:
        """Notes what is new among what a call is handed."""
        for position, slot in call.enters:
            self.slots[slot] = tensors[position]
        if call.form is None:
            for position, number in call.keeps:
                self.keeps(number, tensors[position])

    def returned(self, call: ProgramCall, out: Any) -> None:
        """Called when a call of the program has returned."""
        for position, slot in call.gives:
            self.slots[slot] = out if position < 0 else out[position]
        pool = self._handed
        if call.views:
            results = out if isinstance(out, (tuple, list)) else (out,)
            pool = [*pool, *[item for item in results if isinstance(item, torch.Tensor)]]
        for position, slot, place, facts in call.views:
            view = out if position < 0 else out[position]
            if not share_storage(view, pool[place]) or (geometry_of(view), view.requires_grad) != facts:
                self._recorder.stop_program()
                return
            self.slots[slot] = view
        self._handed = ()
        self.keep_results(call, out)
        self.end = call.last_save

    def keep_results(self, call: ProgramCall, out: Any) -> None:
        """Holds what the program holds of a call's results."""
        for position, number in call.keeps_results:
            self.keeps(number, out if position < 0 else out[position])

    def hook(self, tensor: torch.Tensor) -> Any:
        """The pack hook of a step that follows a program: `saved_tensor.pack` by a shorter way."""
        at = self.num_saved
        if at >= self.end or _num_function_modes():
            return pack(tensor)
        how = self._packs[at]
        if isinstance(how, Wish):
            self.num_saved = at + 1
            ref = self._lists.get(how.lead)
            sources = None if ref is None else ref()
            return Waiting(how, self._segment(how.segment).holding(how.lead) if sources is None else sources)
        if how is not None:
            self.num_saved = at + 1
            return how(tensor)
        packed = self.pack(self._recorder, tensor)
        return pack(tensor) if packed is None else packed

    def close(self) -> None:
        """Called when the forward has returned: autograd has the hook until backward, and may hold nothing by it."""
        self._recorder, self.end = None, -1
        self.slots.clear()
        self._segments.clear()  # a piece holds what it starts from

    def is_other(self, at: int, recorder: Any, tensor: torch.Tensor) -> bool:
        """Whether the program is known to have nothing, or another tensor, saved here."""
        if at >= self.end or (at in self._casts and not recorder.is_new(tensor)):
            return True
        apart = self._apart.get(at)
        if apart is not None and not apart.is_it(tensor, self.slots):
            return True
        geometry = self._program.geometry_at(at) if self._program.is_varied else None
        return isinstance(geometry, Varied) and geometry_of(tensor) != geometry

    def pack(self, recorder: Any, tensor: torch.Tensor) -> Any | None:
        """Returns what autograd gets instead of a tensor; None if the program has nothing saved here."""
        at = self.num_saved
        if self.is_other(at, recorder, tensor):
            recorder.stop_program()
            return None
        self.num_saved = at + 1
        kind, segment, number, geometry = self._program.saves[at]
        if kind == CONSTANT:
            return kept_with_its_node(tensor)
        mask = self._masks.get(at)
        if mask is not None:
            base: Any = self._program.values[mask].base
            if isinstance(base, Varied):
                base = (*geometry_of(tensor)[:3], base.dtype)
            assert base is not None
            self._own(mask, compact(tensor, torch.bool, base))
        if kind == REBUILD:
            wish = self._program.wishes[at]
            if isinstance(geometry, Varied):
                wish = Wish(number, None, geometry_of(tensor), segment, wish.lead)
            return Waiting(wish, self._segment(segment).holding(wish.lead))
        if number < 0:
            return kept_simply(tensor)
        ref = self._kept.get(number)
        kept = None if ref is None else ref()
        if kept is None:
            kept = Kept(tensor)
            self._own(number, kept)
            if self._program.values[number].is_passing:
                kept.part()
            return kept
        assert geometry is not None
        return kept.saved_as(geometry_of(tensor) if isinstance(geometry, Varied) else geometry)

    def _segment(self, index: int) -> SegmentRun:
        found = self._segments.get(index)
        if found is None:
            program = self._program
            segment = program.segments[index]
            around = None if segment.around < 0 else self._segment(segment.around)
            found = self._segments[index] = SegmentRun(
                segment, self.constants, self._lists, around, program.starts[index], self._under, self.noted
            )
        return found

    def keeps(self, number: int, tensor: torch.Tensor) -> bool:
        """Holds a value that a call is handed or returns; always true."""
        if number not in self._kept:  # never a result itself: see `saved_tensor.keep`
            self._own(number, Kept(tensor.detach(), is_saved=False))
        return True

    def begin_draws(self, call: ProgramCall, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Called before a call runs whose random masks nothing tells: they are held where an op first reads them."""
        self._leaves = dict.fromkeys([self._recorder.value_of(tensor) for tensor in parts_of(args, kwargs)[0]])
        self._first_leaf, self._draws = len(self._leaves), call.draws

    def reads_leaf(self, value: Value, tensor: torch.Tensor) -> None:
        """Called where an op reads what none was seen to make."""
        if value in self._leaves:
            return
        number = self._draws.get(len(self._leaves) - self._first_leaf, -1)
        self._leaves[value] = None
        if number >= 0 and geometry_of(tensor) == self._program.values[number].base:
            self._own(number, keep(value, tensor))

    def has_drawn(self, call: ProgramCall) -> bool:
        """Called when it has returned: whether its random masks are held."""
        self._leaves, self._draws = {}, {}
        return self._kept.keys() >= {*call.draws.values()}

    def _own(self, number: int, kept: Kept | KeptCompact) -> None:
        self._kept[number] = weakref.ref(kept)
        holders = self._program.holders.get(number)
        if holders is not None:
            self.slots[self._program.num_slots + number] = kept
            for segment in holders:
                self._segment(segment).keep(number, kept)

    def end_early(self, recorder: Any) -> None:
        """Ends the program before its time: what it holds is made known to the record."""
        self.is_on, self.end = False, -1
        recorder.turn += self.num_saved
        calls = self._program.calls
        recorder.num_followed, recorder.num_in_program = self.num_saved, calls[-1].last_save if calls else 0
        for segment in self._segments.values():
            segment.end_early()
        last, begun = self._retrace(recorder)
        for ref in self._kept.values():
            kept = ref()
            if type(kept) is not Kept:
                continue
            value = Value()
            value.kept = weakref.ref(kept)
            recorder.set_value(kept.tensor, value)
        self.slots.clear()  # whoever is given something of it has it by now
        recorder.begin_segment(in_pieces=begun is not None and begun.begins_piece)
        if last is not None:
            recorder.deriving = last.deriving

    def _retrace(self, recorder: Any) -> tuple[ProgramCall | Boundary | None, OpMark | None]:
        """Has the recorder enter and leave what the step did so far.

        Returns:
            What it came by last, and the mark with which its segment began.
        """
        last: ProgramCall | Boundary | None = None
        begun: OpMark | None = None
        first = 0
        opened: list[str] = []
        told = self._last_told()
        for boundary in self._program.boundaries[:-1]:
            assert boundary.call is not None
            if boundary.index > told and boundary.call.index >= self.call.index:
                break  # nobody knows whether it came by that
            begun = recorder.frame.pass_ops(None, boundary.num_ops) or begun
            if boundary.path is None:
                opened.pop()
                recorder.leave()
            else:
                opened.append(str(boundary.path))
                recorder.enter(boundary.path)
            last, first = boundary, boundary.call.index
        for call in self._program.calls[first : self.call.index]:
            labels = call.form and [label for label, _, _ in call.form.counted]
            begun = recorder.frame.pass_ops(labels, call.num_ops) or begun
            last = call
        inside = [settings.path for settings in recorder.inside]
        while opened != inside[: len(opened)]:
            opened.pop()
            recorder.leave()
        for path in inside[len(opened) :]:
            recorder.enter(path)
        return last, begun

    def _last_told(self) -> int:
        """Returns the place of the last boundary that was passed of those that somebody is told of, -1 if none was."""
        before = self._program.boundaries[: self.boundary.index]
        return next((boundary.index for boundary in reversed(before) if boundary.is_told), -1)
