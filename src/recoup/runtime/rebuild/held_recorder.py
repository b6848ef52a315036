"""The record of a step under a plan by tensor: every op that can run again, and the results that the plan holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch

from recoup import _torch
from recoup.ir.decision import OpMark
from recoup.runtime import execution_context
from recoup.runtime.rebuild import batch_norm, dropout
from recoup.runtime.rebuild.call_forms import CallForm
from recoup.runtime.rebuild.call_log import CallLog
from recoup.runtime.rebuild.cheap_ops import HOLD, OPAQUE, VIEW, OpFacts, has_history, known_facts, op_facts, written_by
from recoup.runtime.rebuild.kept import Kept, Source, on_device
from recoup.runtime.rebuild.lineage import Recorder
from recoup.runtime.rebuild.marks import CallMarks, Frame, reads_masks, reads_numbers
from recoup.runtime.rebuild.op_forms import form_of
from recoup.runtime.rebuild.rewriting import Rewriting
from recoup.runtime.rebuild.saved_tensor import MIN_BYTES, compact, keep
from recoup.runtime.rebuild.segments import Rebuilt, Segment
from recoup.runtime.rebuild.values import Geometry, Made, Value, geometry_of


@_torch.without_dynamo_wrapper
class HeldRecorder(Recorder):
    """Records every op that can run again, and holds the results that a plan names.

    Attributes:
        segment: the one that ops run in now.
        log: of the call that is looked into now.
        lost: marks that met no op of theirs, in words.
        num_followed, num_in_program: of a program that the step has left: tensors that it saved, and would have.
        stop_program: ends the program that the step follows, if it follows one.
        on_write: told of the tensors among an op's arguments before it writes.

    Args:
        marks: by call.
        share: of the planned step's inputs, at most 1: what is too small to be rebuilt shrinks with them.
    """

    is_cheap = False

    def __init__(self, marks: dict[tuple[str, int], CallMarks], share: float = 1.0) -> None:
        super().__init__()
        self.segment = Segment()
        self._around: Segment | None = None
        self._marks = marks
        self._share = share
        self._held: list[Source] = []  # until forward ends: then those that something is rebuilt from stay
        self._leaves: dict[Value, Source] = {}
        # Saved since the last op: its results, or what the next one reads; whether its piece starts from it for that.
        self._latest: list[tuple[weakref.ref[Rebuilt], bool]] = []
        self._calls: dict[str, int] = {}
        self._frames: list[Frame] = []
        self.lost: list[str] = []
        self.num_followed = self.num_in_program = 0
        self.log: CallLog | None = None
        self.stop_program: Callable[[], None] | None = None
        self.on_write: Callable[[list[torch.Tensor]], None] | None = None

    def enter(self, path: str) -> None:
        """Begins a call of the module at `path`: ops are its own until `leave`."""
        super().enter(path)
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        self._frames.append(Frame(path, self._marks.get((path, call)), self.lost))

    def leave(self) -> None:
        """Ends the innermost call."""
        super().leave()
        self._frames.pop()

    @property
    def frame(self) -> Frame:
        """The innermost call."""
        return self._frames[-1]

    def begin_segment(self, *, in_pieces: bool = False, reads: Collection[Value] = ()) -> None:
        """Ends the segment that ops ran in; the next op is the first of another, and `reads` are noted already."""
        self._around = Segment() if in_pieces else None
        self._leaves = {value: kept for value, kept in self._leaves.items() if value in reads}
        self.segment = Segment(self._around)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(map(_torch.is_wrapper_type, types)):
            return NotImplemented  # its own ops come next, on what it is made of
        kwargs = kwargs or {}
        facts = known_facts(id(func))
        if facts is None and not _torch.is_higher_order(func):
            facts = op_facts(func)
        if self.learning is not None and not self.learning.is_open and (facts is None or facts.kind != VIEW):
            self.learning.failed = True  # by code that is no call: what it does in another step nobody would see
        if self.on_write is not None and (written := written_by(facts, args, kwargs)):
            self.on_write(written)
        if self.paused or facts is None:
            self.log_other()
            return super().__torch_dispatch__(func, (), args, kwargs)
        if not self._frames or not facts.is_counted:
            return self._run(facts, args, kwargs)
        mark, is_marked = None, False
        if facts.kind != VIEW:
            is_marked = self._frames[-1].marks is not None and self.watch is None
            mark = self.before_op(facts.label, args) if is_marked else None
            self.pass_op()
            if self.log is not None and reads_numbers(args):
                self.log.count(facts.label)
        if self.log is not None and facts.has_dynamic_shape and (not facts.gathers or reads_masks(args)):
            self.log_other()
        out = self._run(facts, args, kwargs)
        if mark is not None:
            self.obey(mark, out, writes=bool(facts.written or facts.written_names))
        if is_marked:
            for late, result in self._frames[-1].ran(out):
                self.obey(late, result)
        return out

    def _attach_results(self, facts: OpFacts, made: Made | None, out: Any) -> list[tuple[int, torch.Tensor]]:
        """Notes how an op's results were made; returns those that it was noted of, with their positions."""
        if made is None:
            return []
        self._attach(made, out, has_side_results=facts.kind == OPAQUE or facts.pooled_dims > 0)
        results = enumerate(out if isinstance(out, (tuple, list)) else (out,))
        tensors = [(i, t) for i, t in results if isinstance(t, torch.Tensor) and has_history(t)]
        return [(i, t) for i, t in tensors if (value := self.existing(t)) is not None and value.made is made]

    def note_value(self, tensor: torch.Tensor, value: Value, *, is_over: bool = False) -> None:
        """Sets the value of a tensor's storage, unless it has one.

        Args:
            is_over: the call that made it may have given the storage earlier values.
        """
        if is_over:
            self.set_value(tensor, value)
        else:
            self._values.setdefault(weakref.ref(tensor.untyped_storage(), self._values.pop), value)

    def note_written(self, tensor: torch.Tensor, value: Value | None) -> None:
        """Notes what is in a storage that a call wrote to past this recorder, None if that has no history."""
        known = self.existing(tensor)
        if known is None and value is not None:
            self._set(tensor.untyped_storage(), value)
        elif value is None or known is not value:
            self._replace(tensor, value or Value())

    def show_mask(self, value: Value, tensor: torch.Tensor) -> Source:
        """Keeps a random mask as bytes, from what shows it (`CallForm.shows`), to the end of the segment at least."""
        kept: Source | None = value.alive()
        if kept is None and not value.random_mask:  # itself, that of a kernel
            self.note_value(tensor, value)
            kept = keep(value, tensor)
        elif kept is None:
            assert value.base is not None
            kept = compact(tensor, torch.bool, value.base)
            value.kept = weakref.ref(kept)
        self._leaves[value] = kept
        return kept

    def note_results(self, form: CallForm, values: list[Value], out: Any) -> None:
        """Notes what made the results of a call that ran past this recorder, if they are like those of its form."""
        if form.results[0][0] < 0:
            if type(out) is torch.Tensor and form.gives(out) and out.storage_offset() == form.results[0][2]:
                self.note_value(out, values[form.results[0][1]], is_over=bool(form.passing))
            return
        given = [out[position] for position, _, _ in form.results]
        if form.gives(*given):
            for tensor, (_, number, offset) in zip(given, form.results, strict=True):
                if tensor.storage_offset() == offset:
                    self.note_value(tensor, values[number], is_over=bool(form.passing))

    def log_other(self) -> None:
        """Notes that the call that is looked into runs an op that has no form."""
        if self.log is not None:
            self.log.add_other()

    def _run(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs and records an op."""
        if facts.runs_again(args):
            made = self._made(facts, args, kwargs)
            out = facts.overload(*args, **kwargs)
            results = self._attach_results(facts, made, out)
            if self.log is not None and (results or not self._are_views(out)):
                self.log.add_op(form_of(facts, args, kwargs, out, results), made, self._values_of(results))
            return out
        if not facts.is_inert:
            return self._run_writing(facts, args, kwargs)
        out = facts.overload(*args, **kwargs)
        if facts.is_dropout:
            self._note_dropout(args, out)
        if facts.label == HOLD:
            self.log_other()
            if self.deriving:
                self.hold(out)
        return out

    def _are_views(self, out: Any) -> bool:
        """Whether results lie over storages that were there before, though the op's schema does not say so."""
        outs = out if isinstance(out, (tuple, list)) else (out,)
        return all([isinstance(t, torch.Tensor) and self.existing(t) is not None for t in outs])

    def _note_dropout(self, args: tuple[Any, ...], out: Any) -> None:
        made = self.note_dropout(args, out)
        if self.log is None or made is None:
            return
        values = self._values_of([(0, out[0])])
        scale = made.args[2]
        self.log.drawn.append(made.reads[1].value)
        form = form_of(op_facts(dropout.MADE_BY), (args[0], out[1], scale), {}, out[0], [(0, out[0])])
        self.log.add_op(form, made, values)

    def _run_writing(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs and records an op that writes to what it is handed."""
        if self.log is None:
            out = super().__torch_dispatch__(facts.overload, (), args, kwargs)
            if facts.updates(args):
                batch_norm.note_applied(self, args, out)
            return out
        written = facts.written_tensors(args, kwargs)
        if not all(map(has_history, written)):
            self.log_other()
            return super().__torch_dispatch__(facts.overload, (), args, kwargs)
        olds = [(tensor, self.value_of(tensor)) for tensor in written]
        out = super().__torch_dispatch__(facts.overload, (), args, kwargs)
        applied = batch_norm.note_applied(self, args, out) if facts.updates(args) else None
        if applied is not None:
            self.log.add_applied(applied)
        elif facts.is_batch_norm:
            made = next((v.made for v in map(self.existing, out) if v is not None), None)
            results = [(i, t) for i, t in enumerate(out) if (v := self.existing(t)) is not None and v.made is made]
            args = (*args[:3], None, None, *args[5:])  # as it runs again
            self.log.add_op(form_of(facts, args, kwargs, out, results), made, self._values_of(results))
        for tensor, old in olds:
            self.log.add_write(facts, args, kwargs, tensor, old, self.existing(tensor))
        return out

    def _values_of(self, results: list[tuple[int, torch.Tensor]]) -> list[Value]:
        return [value for value in [self.existing(tensor) for _, tensor in results] if value is not None]

    def obey(self, mark: OpMark, out: Any, *, writes: bool = False) -> None:
        """Carries out an op's mark: holds its results, lets them stay, or joins them to the segment's pieces."""
        if mark.holds:
            self.hold(out, writes=writes)
        elif mark.stays or mark.is_joint:
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor) and has_history(tensor):
                    value = self.value_of(tensor)
                    value.stays = mark.stays
                    if mark.is_joint and self._around is not None:
                        self._around.joints.add(value)

    def _made(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made | None:
        made = super()._made(facts, args, kwargs)
        if made is not None:
            made.values = tuple([read.value for read in made.reads])
        return made

    def _attach_one(self, made: Made, tensor: torch.Tensor, position: int) -> Value:
        base = geometry_of(tensor)
        made.written.append(base)
        return self._note(made, tensor, position, base)

    def _note(self, made: Made, tensor: torch.Tensor, position: int, base: Geometry) -> Value:
        """Notes which op made a result; returns its value."""
        value = Value()
        value.made = made
        value.base = base
        if position:
            value.output = position
        # An op may return a view without its schema saying so: its storage has a value then.
        return self._values.setdefault(weakref.ref(tensor.untyped_storage(), self._values.pop), value)

    def _rewriting(
        self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Made | None, Geometry | None]:
        """Any op in place runs again on a copy of the storage that it wrote over or wrote a part of."""
        made, base = super()._rewriting(facts, args, kwargs)
        target = args[0] if args else None
        if made is not None or not facts.can_rewrite or not isinstance(target, torch.Tensor) or not has_history(target):
            return made, base
        old = self.existing(target)
        if old is None or old.made is None or old.base is None or old.base[3] != target.dtype:
            return None, None
        made = self._made(facts, (target, *args[1:]), kwargs)
        if made is not None:
            made.function = Rewriting(facts.overload, made.reads[0].geometry)
            made.reads[0].geometry = old.base
        return made, old.base

    def pack(self, tensor: torch.Tensor, value: Value) -> Rebuilt | None:
        """Returns a `Rebuilt` where what is held leads to the tensor, None where it has to be kept."""
        # A small view would keep all of a large storage.
        if (
            value.made is None
            or value.stays
            or not self.deriving
            or tensor.untyped_storage().nbytes() < MIN_BYTES * self._share
        ):
            return None
        geometry = geometry_of(tensor)
        base = value.base
        if base is None or base[3] is not geometry[3]:
            return None
        segment = self.segment
        was_start = value in segment.starts
        sources = segment.reach(value)
        if sources is None:
            return None
        if execution_context.observer() is not None:
            execution_context.rederived(tensor, [t for t in map(on_device, sources) if t is not None])
        found = Rebuilt(value, base if geometry == base else geometry, segment, sources, self.surroundings())
        self._latest.append((weakref.ref(found), not was_start and value in segment.starts))
        return found

    def before_op(self, name: str, args: tuple[Any, ...]) -> OpMark | None:
        """Counts an op of the innermost call, in which there are marks; returns what the plan says of it."""
        mark = self._frames[-1].meet(name) if reads_numbers(args) else None
        if mark is not None:
            self.begin(mark)
        return mark

    def begin(self, mark: OpMark, reads: Collection[Value] = ()) -> None:
        """Begins what the plan has begin with an op; `reads`: what is noted already of what it reads."""
        before = self.segment
        if mark.begins_segment:
            self.begin_segment(in_pieces=mark.begins_piece, reads=reads)
            self.deriving = not mark.saves
        elif mark.begins_piece:
            self.segment = Segment(self._around)
        if before is self.segment or not self.deriving:
            return
        for ref, is_start in self._latest:  # an op's inputs are saved before it is dispatched
            rebuilt = ref()
            if rebuilt is not None:
                rebuilt.move(self.segment)
                if is_start and rebuilt.segment is self.segment:
                    before.forget(rebuilt.value)

    def pass_op(self) -> None:
        """Notes that an op runs: what is saved from now on is saved of its results or for the next one."""
        self._latest.clear()

    def num_saved(self) -> int:
        """Returns how many saved tensors autograd still holds; those of freed graphs (a logged value) are gone."""
        return sum(ref() is not None for ref in self.packed)

    def obey_for(self, mark: OpMark, value: Value, kept: Source) -> None:
        """As `obey`, for a value whose contents are kept already."""
        if mark.holds:
            self._held.append(kept)
        elif mark.is_joint and self._around is not None:
            self._around.joints.add(value)

    def hold(self, out: Any, *, writes: bool = False) -> None:
        """Holds the results of an op.

        Args:
            writes: whether it wrote them in place: their versions count up only after this.
        """
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and has_history(tensor):
                value = self.value_of(tensor)
                kept = value.alive()
                if value.constant is None and kept is None:
                    kept = keep(value, tensor)
                if kept is not None:
                    if isinstance(kept, Kept):
                        kept.version += writes
                        kept.is_source = True  # before what is rebuilt from it is saved, it may be written over
                        if value.is_passing:
                            with _torch.past_dispatch_modes():  # the copy is no op of the step
                                kept.part()
                    self._held.append(kept)

    def read_leaf(self, value: Value, tensor: torch.Tensor) -> None:
        """Holds what is read and no op was seen to make, to the segment's end at least; programs do by themselves."""
        if self.watch is not None:
            self.watch.reads_leaf(value, tensor)
        elif value not in self._leaves:
            self._leaves[value] = value.alive() or keep(value, tensor)
            if self.log is not None:
                self.log.leaves.append(value)
