"""A step under a plan that only rederives, held against an earlier one that was like it.

The rules are those of [Note: step programs]; each saved tensor is rebuilt by itself (`derived.py`), not in segments.

What has no program: steps in which an op writes to what something is rebuilt from.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.ir.decision import LossInPlace
from recoup.runtime.loss_in_place import LossInPlaceMode, losses_in_place
from recoup.runtime.rebuild.call_forms import CallForm, form_after, form_before
from recoup.runtime.rebuild.call_log import CallLog
from recoup.runtime.rebuild.calls import CallWatch
from recoup.runtime.rebuild.derived import NumberedOp
from recoup.runtime.rebuild.dynamic_rederive import RederiveComparison
from recoup.runtime.rebuild.kept import (
    Kept,
    KeptCompact,
    KeptConstant,
    KeptView,
    Source,
)
from recoup.runtime.rebuild.known_calls import Calls
from recoup.runtime.rebuild.learning import Learning
from recoup.runtime.rebuild.rederive_program import Compact, RederiveProgram, RederiveRun, Save
from recoup.runtime.rebuild.rederived import Rederived
from recoup.runtime.rebuild.rerun import has_memory
from recoup.runtime.rebuild.saved_tensor import rederive
from recoup.runtime.rebuild.step_program import CONSTANT, KEEP, REBUILD, ProgramCall, StepKey, StepProgram, parts_of
from recoup.runtime.rebuild.step_run import StepRun
from recoup.runtime.rebuild.values import Value, geometry_of
from recoup.runtime.rebuild.watched_recorder import WatchedRecorder


def _is_cast(value: Value) -> bool:
    """Whether an op made it of a parameter alone."""
    made = value.made
    return made is not None and len(made.reads) == 1 and made.reads[0].value.constant is not None


class RederiveLearning(Learning):
    """Notes a step while it is recorded op by op."""

    def __init__(self, recorder: Any) -> None:
        super().__init__(recorder)
        self._kept: list[Save] = []
        self._of: weakref.WeakKeyDictionary[Source, Value] = weakref.WeakKeyDictionary()
        self._compacts: dict[int, Compact] = {}
        self._sources: set[Value] = set()  # that may not be written over: rebuilt, or what something is rebuilt from
        self._chained: set[Value] = set()
        self._orders: set[int] = set()  # of ops in calls that have a form
        self._first = 0
        self._handed: list[torch.Tensor] = []
        self._values_of: list[list[Value | None]] = []  # of what each call was handed

    def begin_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Called before a call runs."""
        handed, scalars = parts_of(args, kwargs)
        tensors = list({id(t): t for t in handed}.values())
        if not all(map(_is_plain, tensors)):
            self.failed = True
            return
        self._handed = handed
        new = [t.untyped_storage()._cdata for t in tensors if self._slots.of(t) is None]
        self.failed = self.failed or len(set(new)) < len(new)
        for tensor in tensors:
            self._recorder.value_of(tensor)
        call = self.begin(func, None, tensors)
        self._values_of.append(self._values_now)
        call.scalars = scalars
        call.note_items(args, kwargs, tensors)
        self._first = self._recorder.num_made

    def end_call(self, form: CallForm | None, out: Any) -> None:
        """Called when it has returned."""
        handed, self._handed, self._handed_now = self._handed, [], ()
        if self.failed:
            return
        call = self._calls[-1]
        call.form = form
        if form is not None:
            self._orders.update(range(self._first + 1, self._recorder.num_made + 1))
            self._apart.drop(call.first_save)
        else:  # what it is handed twice counts twice
            places: dict[int, int] = {}
            for tensor in handed:
                places.setdefault(id(tensor), len(places))
            at = [places[id(tensor)] for tensor in handed]
            reads = call.reads
            call.reads = [reads[i] for i in at]
            call.enters = [(at.index(i), slot) for i, slot in call.enters]
            for i, (kind, _, geometry, _) in enumerate(self._kept[call.first_save :], call.first_save):
                if kind == CONSTANT:  # which nobody checks
                    self._kept[i] = (KEEP, -1, geometry, ())
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if not all(map(_is_plain, [t for t in outs if isinstance(t, torch.Tensor)])):
            self.failed = True
            return
        if form is None:
            self._handed_now = handed
        self.end(out, 0)

    def saved(self, tensor: torch.Tensor, value: Value | None, packed: Any) -> None:
        """Called when a tensor was packed."""
        self._saves.append((type(packed), value, geometry_of(tensor)))  # which are counted
        kind, sources = KEEP, []
        if self.failed:
            return
        if type(packed) is KeptConstant:
            kind, value = CONSTANT if self.is_open else KEEP, None
        elif type(packed) is Kept or type(packed) is KeptView:
            if value is not None:
                self._of[packed.kept if isinstance(packed, KeptView) else packed] = value
        elif type(packed) is Rederived and value is not None:
            kind = REBUILD
            self._sources.add(value)
            if _is_cast(value) and value not in self._numbers:
                self._casts.add(len(self._kept))  # new here, since its op was recorded
            for source in packed.sources:
                if type(source) is KeptCompact and source not in self._of:
                    self._note_compact(value, source)
            sources = [self._of[s] for s in packed.sources if s in self._of]
            self._sources.update([v for s, v in zip(packed.sources, sources, strict=False) if type(s) is Kept])
            self.failed = len(sources) < len(packed.sources) or not self._chain(value, set(sources))
        else:
            self.failed = True
        if value is not None and (kind == REBUILD or not self.is_open):
            self._apart.note(len(self._kept), tensor, self._slots.over(tensor))
        number = -1 if value is None else self._number(value)
        self._kept.append((kind, number, geometry_of(tensor), tuple(map(self._number, sources))))

    def _note_compact(self, value: Value, kept: KeptCompact) -> None:
        """Notes what is kept in fewer bytes: a value that is saved, or the random mask that it shows."""
        if value.alive() is not kept and value.made is not None and len(value.made.reads) == 1:
            value = value.made.reads[0].value
        if value.alive() is kept:
            self._of[kept] = value
            self._compacts[len(self._kept)] = self._number(value), kept.narrow.dtype, kept.base

    def _chain(self, value: Value, sources: set[Value]) -> bool:
        """Notes the ops that lead from its sources to a value; whether a program can have them."""
        stack, seen = [value], set(sources)
        while stack:
            current = stack.pop()
            if current in seen:
                continue
            seen.add(current)
            self._number(current)
            if current.constant is not None:
                self._sources.add(current)
                continue
            made = current.made
            if made is None:
                return False
            if made.side_results and not all([ref() in sources for ref in made.outputs[1:]]):
                return False
            self._chained.add(current)
            stack += [read.value for read in made.reads]
        return True

    def program(self) -> StepProgram | None:
        """Returns the program of the step that was noted, None if it has none."""
        if self.failed or self.is_open:
            return None
        if any(v.made is None or v.made.order not in self._orders for v in self._chained):
            return None
        if not self._sources.isdisjoint(self._written) or not self._place_constants():
            return None
        rebuilt = {number for kind, number, *_ in self._kept if kind == REBUILD}
        asked = rebuilt.union(*[sources for *_, sources in self._kept])
        # Nobody asks which value the others have.
        kept = [(k, number if number in asked else -1, g, s) for k, number, g, s in self._kept]
        seen = {at for at, (_, number, *_) in enumerate(kept) if number >= 0} | self._compacts.keys() | self._casts
        self._rests.orders = {v.made.order for v in self._chained if v.made is not None}
        self._rests.values = (
            self._chained | self._sources | {v for v, number in self._numbers.items() if number in asked}
        )
        # Few modules are patched: where the one is left out before which the mode goes on, a loss would not be seen.
        has_loss = any(call.func in self._rests.functions for call in self._calls)
        all_calls = self._calls
        idle = self._let_go(seen, 0 if has_loss else len(self._calls))
        apart = self._apart.placed(self._calls)
        if apart is None:
            return None
        calls = self._calls
        ops = {self._numbers[v]: self._numbered(v, all_calls) for v in self._chained}
        parts = self._compacts, self._slots.num, self._constants, frozenset(self._casts), frozenset(seen)
        program = RederiveProgram(calls, kept, self._numbers, ops, *parts, idle.boundaries, apart)
        idle.place([*calls, program.end])
        return program

    def _numbered(self, value: Value, calls: Sequence[ProgramCall]) -> NumberedOp:
        """Returns the op that made a value, in its call."""
        assert value.made is not None
        index = self._rests.call_of(value.made.order)
        return NumberedOp(value.made, value, self._numbers, calls[index], self._values_of[index])

    def _place_constants(self) -> bool:
        """Has parameters that something is rebuilt from noted by the call that reads them first."""
        for value, number in self._numbers.items():
            if value.constant is None:
                continue
            index, is_result, position = self._seen.get(value, (0, True, 0))
            call = self._calls[index]
            if is_result or call.form is None:
                return False
            call.reads_constants = (*call.reads_constants, (position, number))
        return True


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a program can tell this tensor from others."""
    if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
        return False
    if tensor.layout is not torch.strided or tensor.is_inference() or tensor.is_neg() or tensor.is_conj():
        return False
    return type(tensor) is torch.Tensor or (has_memory(tensor) and not hasattr(tensor, "ds_id"))


class RederiveCalls(Calls):
    """The programs of a plan that only rederives."""

    learns = RederiveLearning
    follows = RederiveRun
    compares = RederiveComparison

    def begin(self, recorder: Any, key: StepKey) -> StepRun | Learning | None:
        """As that of any plan."""
        found = super().begin(recorder, key)
        if isinstance(found, Learning):  # what is kept for nothing where sizes do not vary is over the prediction
            found.keeps_lists = any(other != key.alike for other in self._learned.get(key.of_any_size, ()))
        return found


class RederiveWatch(CallWatch):
    """The torch-function mode in front of a recorder."""

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Runs a call that no program has; learns from it."""
        learning: Any = self._learning
        if learning is None or learning.failed:
            return self._ran(func, args, kwargs)
        learning.begin_call(func, args, kwargs)
        recorder: Any = self.recorder
        log = CallLog()
        learns = not self._is_loss(func) and self._calls.may_learn(func, args)
        told = form_before(func, args, kwargs, log.state) if learns else None
        recorder.log = log
        try:
            out = self._ran(func, args, kwargs)
        finally:
            recorder.log = None
        form = None if learning.failed else form_after(told, out, log, recorder.existing)
        learning.end_call(form, out)
        return out


@contextlib.contextmanager
def rederived_step(
    calls: RederiveCalls, key: Any, *, by_default: bool, loss: LossInPlace | None = None
) -> Iterator[None]:
    """As `rederive`, for a step of a plan; steps with an equal `key` may be alike. `loss`: how losses in it run."""
    watch = None
    if not (_torch.has_user_function_modes() or calls.is_compiled or _torch.inside_transform()):
        recorder = WatchedRecorder(calls)
        recorder.deriving = by_default
        watch = RederiveWatch(recorder, calls, key, None if loss is None else LossInPlaceMode(loss))
    if watch is None or not watch.is_busy:
        with losses_in_place(loss), rederive(by_default=by_default):
            yield
        return
    with watch, recorder, _torch.on_compiled_calls(watch.leave), watch.hooks:
        yield
    watch.learn()
