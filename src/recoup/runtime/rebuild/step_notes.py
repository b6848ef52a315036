"""What a step does, noted while it is recorded: `learning.py` makes its program of that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.runtime.rebuild.boundaries import Passed, Rests
from recoup.runtime.rebuild.call_forms import CallForm
from recoup.runtime.rebuild.call_log import CallLog
from recoup.runtime.rebuild.kept import Kept, KeptConstant, KeptView
from recoup.runtime.rebuild.saved_apart import Apart
from recoup.runtime.rebuild.segment_program import RebuiltSave
from recoup.runtime.rebuild.segments import Rebuilt
from recoup.runtime.rebuild.slots import Slots, memory_of
from recoup.runtime.rebuild.step_program import ProgramCall, parts_of
from recoup.runtime.rebuild.values import Geometry, Value, geometry_of


class StepNotes:
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
        self._hidden: dict[Value, tuple[ProgramCall, int]] = {}  # those that none tells: call, place among its leaves
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
            self._hidden.update((value, (call, place)) for place, value in log.hidden.items())
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
