"""The record of a step under a plan by tensor: every op that can run again, and the results that the plan holds."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.ir.decision import OpMark
from recoup.runtime import execution_context
from recoup.runtime.rebuild.cheap_ops import HOLD, OPAQUE, VIEW, OpFacts, has_history, known_facts, op_facts
from recoup.runtime.rebuild.constant import Constant
from recoup.runtime.rebuild.kept import Kept, Source, laid, on_device
from recoup.runtime.rebuild.lineage import Geometry, Made, Recorder, Value, geometry_of
from recoup.runtime.rebuild.marks import Frame, reads_numbers
from recoup.runtime.rebuild.saved_tensor import MIN_BYTES, compact_mask
from recoup.runtime.rebuild.segments import Rebuilt, Segment
from recoup.runtime.rebuild.sites import Noted, Site, Sites, are_plain


@_torch.without_dynamo_wrapper
class HeldRecorder(Recorder):
    """Records every op that can run again, and holds the results that a plan names.

    Attributes:
        segment: the one that ops run in now.
        lost: marks that met no op of theirs, in words.

    Args:
        marks: by call, then by number of op.
        sites: what earlier steps were like.
    """

    is_cheap = False

    def __init__(
        self,
        marks: dict[tuple[str, int], dict[int, OpMark]],
        sites: Sites | None = None,
    ) -> None:
        super().__init__()
        self._sites = Sites() if sites is None else sites
        self.segment = Segment()
        self._around: Segment | None = None
        self._marks = marks
        self._held: list[Source] = []  # until forward ends: then those that something is rebuilt from stay
        self._leaves: dict[Value, Source] = {}
        self._calls: dict[str, int] = {}
        self._frames: list[Frame] = []
        self.lost: list[str] = []

    def enter(self, path: str) -> None:
        """Begins a call of the module at `path`: ops are its own until `leave`."""
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        self._frames.append(Frame(path, self._marks.get((path, call)), self._sites.of(path)))

    def leave(self) -> None:
        """Ends the innermost call."""
        frame = self._frames.pop()
        if frame.missed is not None:
            self._lose(frame)

    def begin_past(self, path: str, marks: dict[int, OpMark] | None) -> bool:
        """Begins a call of the module at `path` that runs past this recorder, if these are the plan's marks in it."""
        call = self._calls.get(path, 0)
        if self._marks.get((path, call)) is not marks:
            return False
        self._calls[path] = call + 1
        return True

    def note_call(self, done: tuple[Site, Any, dict[str, Any]], values: tuple[Value, ...], out: torch.Tensor) -> None:
        """Notes the one recorded op of a call that ran past this recorder: what it is, what it read, and its result."""
        self._num_made += 1
        made = Noted(done[0], values, done[1], done[2], self._num_made)
        self._note(made, out, *done[0].bases[0])

    @property
    def frame(self) -> Frame:
        """The innermost call."""
        return self._frames[-1]

    def existing(self, tensor: torch.Tensor) -> Value | None:
        """Returns the value of the tensor's storage, None if it was not seen yet."""
        return self._existing(tensor)

    def begin_segment(self, *, in_pieces: bool = False) -> None:
        """Ends the segment that ops ran in; the next op is the first of another."""
        self._around = Segment() if in_pieces else None
        self._leaves.clear()
        self.segment = Segment(self._around)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(map(_torch.is_wrapper_type, types)):
            return NotImplemented  # its own ops come next, on what it is made of
        kwargs = kwargs or {}
        frames = self._frames
        frame = frames[-1] if frames and not self.paused else None
        if frame is None or (site := frame.sites.get(place := frame.place)) is None or site.overload is not func:
            return self._record(func, args, kwargs)
        frame.place = place + 1
        mark = None
        if frame.marks is not None and (facts := op_facts(func)).kind != VIEW:
            mark = self.before_op(facts.label, args)
        if site.kinds is None:
            out = site.call(*args, **kwargs) if kwargs else site.call(*args)
        elif (values := self._sources(site, args, kwargs)) is not None:
            out = site.call(*args, **kwargs) if kwargs else site.call(*args)
            if site.has_results(out):
                self._num_made += 1
                made = Noted(site, values, site.rest(args), kwargs, self._num_made)
                for position, base in site.bases:
                    self._note(made, out if site.is_single else out[position], position, base)
            else:
                self._attach_results(op_facts(func), self._made(op_facts(func), args, kwargs), out)
        else:
            out = self._run(op_facts(func), args, kwargs, frame, place)
        if mark is not None:
            self._obey(mark, out)
        return out

    def _attach_results(self, facts: OpFacts, made: Made | None, out: Any) -> list[tuple[int, torch.Tensor]]:
        """Notes how an op's results were made; returns those that it was noted of, with their positions."""
        if made is None:
            return []
        self._attach(made, out, has_side_results=facts.kind == OPAQUE or facts.pooled_dims > 0)
        results = enumerate(out if isinstance(out, (tuple, list)) else (out,))
        tensors = [(i, t) for i, t in results if isinstance(t, torch.Tensor) and has_history(t)]
        return [(i, t) for i, t in tensors if (value := self._existing(t)) is not None and value.made is made]

    def _sources(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Value, ...] | None:
        """Returns the values that an op reads if it is the one that its site knows, None if it is another."""
        if tuple(map(type, args)) != site.kinds:
            return None
        if kwargs and (tuple(kwargs) != site.names or not are_plain(kwargs)):
            return None
        tensors = site.tensors(args)
        if not site.matches(*tensors):
            return None
        found = []
        known, ref = self._values.get, weakref.ref
        for tensor, geometry in zip(tensors, site.geometries, strict=True):
            value = known(ref(tensor.untyped_storage()))
            if value is None:
                value = self.value_of(tensor)
            if value.made is None and value.constant is None:
                self.read_leaf(value, tensor)
            base = value.base  # one and the same object where it is read as it was made
            if base is not geometry and base is not None and base[3] is not geometry[3]:
                return None
            if tensor.storage_offset() != geometry[2]:
                return None
            found.append(value)
        return tuple(found)

    def value_read(self, tensor: torch.Tensor) -> Value:
        """Returns the value of what an op is about to read."""
        value = self._values.get(weakref.ref(tensor.untyped_storage()))
        if value is None:
            value = self.value_of(tensor)
        if value.made is None and value.constant is None:
            self.read_leaf(value, tensor)
        return value

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op that no site knows, and records it."""
        facts = known_facts(id(func))
        if facts is None and not _torch.is_higher_order(func):
            facts = op_facts(func)
        if self.paused or facts is None:
            return super().__torch_dispatch__(func, (), args, kwargs)
        if not self._frames or not facts.is_counted:
            return self._run(facts, args, kwargs, None, -1)
        frame = self._frames[-1]
        place = frame.place
        frame.place = place + 1
        mark = None if frame.marks is None or facts.kind == VIEW else self.before_op(facts.label, args)
        out = self._run(facts, args, kwargs, frame, place)
        if mark is not None:
            self._obey(mark, out)
        return out

    def _run(
        self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Frame | None, place: int
    ) -> Any:
        """Runs and records an op by all of its arguments; its site learns from it, if `frame` has one."""
        if facts.can_rerun and not facts.is_batch_norm:
            made = self._made(facts, args, kwargs)
            out = facts.overload(*args, **kwargs)
            results = self._attach_results(facts, made, out)
            if frame is None or made is None:
                pass
            elif results or not isinstance(out, torch.Tensor) or self._existing(out) is None:
                self._sites.learn(frame.sites, place, facts, args, kwargs, out, results)
            else:  # a view, though its schema does not say so
                self._sites.passing(frame.sites, place, facts.overload)
            return out
        if not facts.is_inert:
            return super().__torch_dispatch__(facts.overload, (), args, kwargs)
        out = facts.overload(*args, **kwargs)
        if facts.label != HOLD:
            if frame is not None:
                self._sites.passing(frame.sites, place, facts.overload)
        elif self.deriving:
            self.hold(out)
        return out

    def _obey(self, mark: OpMark, out: Any) -> None:
        """Does with an op's results what the plan says."""
        if mark.holds:
            self.hold(out)
        elif mark.is_joint:
            self.join(out)

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
        old = self._existing(target)
        if old is None or old.made is None or old.base is None or old.base[3] != target.dtype:
            return None, None
        made = self._made(facts, (target, *args[1:]), kwargs)
        if made is not None:
            made.function = Rewriting(facts.overload, made.reads[0].geometry)
            made.reads[0].geometry = old.base
        return made, old.base

    def pack(self, tensor: torch.Tensor, value: Value) -> Rebuilt | None:
        """Returns a `Rebuilt` where what is held leads to the tensor, None where it has to be kept."""
        if value.made is None or not self.deriving or tensor.nbytes < MIN_BYTES:
            return None
        geometry = geometry_of(tensor)
        base = value.base
        if base is None or base[3] is not geometry[3]:
            return None
        segment = self.segment
        sources = segment.reach(value)
        if sources is None:
            return None
        if execution_context.observer() is not None:
            execution_context.rederived(tensor, [t for t in map(on_device, sources) if t is not None])
        return Rebuilt(value, base if geometry == base else geometry, segment, self.surroundings())

    def before_op(self, name: str, args: tuple[Any, ...]) -> OpMark | None:
        """Counts an op, no view, of the innermost call, in which there are marks; returns what the plan says of it.

        Where another op stands than the marked one, the numbers go on; if the marked one comes later, there were ops
        more than the plan knows, and it is numbered as the plan has it.
        """
        frame = self._frames[-1]
        marks, ordinal, missed = frame.marks, frame.ordinal, frame.missed
        if marks is None or not reads_numbers(args):
            return None
        frame.ordinal = ordinal + 1
        mark = marks.get(ordinal)
        if mark is None or mark.op != name:
            if missed is None or missed.op != name:
                if mark is not None and missed is None:
                    frame.missed = mark
                return None
            mark = missed
            frame.ordinal = mark.ordinal + 1
        elif missed is not None:
            self._lose(frame)
        frame.missed = None
        if mark.begins_segment:
            self.begin_segment(in_pieces=mark.begins_piece)
            self.deriving = not mark.saves
        elif mark.begins_piece:
            self.segment = Segment(self._around)
        return mark

    def _lose(self, frame: Frame) -> None:
        assert frame.missed is not None
        self.lost.append(f"`{frame.path}` runs no {frame.missed.op} as op {frame.missed.ordinal}")

    def num_saved(self) -> int:
        """Returns how many of the tensors that autograd saved it still has: what is asked and logged is gone."""
        return sum(ref() is not None for ref in self.packed)

    def hold(self, out: Any) -> None:
        """Holds the results of an op."""
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and has_history(tensor):
                value = self.value_of(tensor)
                kept = value.alive()
                if value.constant is None and kept is None:
                    kept = keep(value, tensor)
                if kept is not None:
                    self._held.append(kept)

    def join(self, out: Any) -> None:
        """Notes that the results of an op are held for the pieces of the segment once it is rebuilt."""
        if self._around is not None:
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor) and has_history(tensor):
                    self._around.joints.add(self.value_of(tensor))

    def read_leaf(self, value: Value, tensor: torch.Tensor) -> None:
        """Holds, to the end of the segment at least, what an op reads and no op was seen to make."""
        base = tensor if isinstance(tensor, nn.Parameter) else tensor._base
        if isinstance(base, nn.Parameter) or (base is not None and _torch.is_sharded_parameter(base)):
            # A view of a parameter is as constant as itself; FSDP1's weights are views of what it takes away.
            value.constant = Constant(base)
        elif value not in self._leaves:
            self._leaves[value] = value.alive() or keep(value, tensor)


class Rewriting:
    """Runs an op in place again, on a copy of the storage that it wrote to.

    Args:
        op: the overload. part: geometry of what it writes over.
    """

    __slots__ = ("op", "part")

    def __init__(self, op: Any, part: Geometry) -> None:
        self.op = op
        self.part = part

    def __call__(self, whole: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the whole storage after the op."""
        copied = torch.empty_strided(whole.size(), whole.stride(), dtype=whole.dtype, device=whole.device).copy_(whole)
        self.op(laid(copied, self.part), *args, **kwargs)
        return copied


def keep(value: Value, tensor: torch.Tensor) -> Source:
    """Keeps a tensor's contents for who rebuilds from them; a random mask of zeros and ones as bytes."""
    if value.random_mask:
        kept: Source = compact_mask(value, tensor)
    else:
        # Never a result itself: autograd gives it a node once the op has returned, and that node saves what is rebuilt
        # from here, a cycle that no collector sees. Below autograd a plain `detach` would count changes in place apart.
        kept = Kept(_torch.alias_below_autograd(tensor))
    value.kept = weakref.ref(kept)
    return kept
