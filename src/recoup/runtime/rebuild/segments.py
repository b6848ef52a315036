"""Rebuilding by tensor: saved tensors of a segment of the forward are rebuilt together from the results that are held.

[Note: segments]
1. The forward's ops are recorded (`lineage.py`), matmuls and convolutions too: every op that reads tensors and returns
   new ones. A segment is an interval of them.
2. A saved tensor whose history leads to held results is not kept: autograd gets a `Rebuilt`, and its segment
   remembers the sources. What no history leads to (random numbers, opaque kernels, inputs) is held.
3. The first `Rebuilt` of a segment that backward unpacks has all of its segment's rebuilt: each op that is needed runs
   once, in forward order; an intermediate is let go after its last reader, a result after the last who waits for it.
4. Nothing of the user's Python runs twice: the very overloads run on the very arguments, below autocast and autograd.

The scheme is that of activation checkpointing (Chen et al., arXiv 1604.06174) with tensors in the place of modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from recoup import _torch
from recoup.ir.decision import OpMark
from recoup.runtime import execution_context
from recoup.runtime.rebuild.cheap_ops import OPAQUE, op_facts
from recoup.runtime.rebuild.kept import Kept, Source, changed_since, laid, on_device
from recoup.runtime.rebuild.lineage import Geometry, Made, Read, Recorder, Surroundings, Value, geometry_of
from recoup.runtime.rebuild.rederived import constant_contents, fitted, paused
from recoup.runtime.rebuild.saved_tensor import MIN_BYTES, compact_mask
from recoup.runtime.waiting import Waiting

DETACH = "aten.detach.default"  # not counted: where fake tensors are kept, the engine dispatches some of its own


class Segment:
    """An interval of the forward's ops.

    Attributes:
        pending: for each value, the `Rebuilt` that backward has still to unpack; they hold it once it was rebuilt.
        sources: what keeps the held results that its values are rebuilt from.
    """

    __slots__ = ("_reached", "pending", "sources")

    def __init__(self) -> None:
        self.pending: dict[Value, Waiting] = {}
        self.sources: dict[int, Source] = {}
        self._reached: set[Value] = set()

    def reach(self, value: Value) -> list[Source] | None:
        """Returns the sources that a value is rebuilt from, less those known to the segment; None: it cannot be.

        Walks the record back to what is held; what was walked before is known.
        """
        found: dict[int, Source] = {}
        seen: set[Value] = set()
        stack = [value]
        while stack:
            current = stack.pop()
            if current in seen or current in self._reached:
                continue
            seen.add(current)
            if current.constant is not None:
                if current.constant._version != current.constant_version or not has_memory(current.constant):
                    return None
                continue
            kept = current.alive()
            if kept is not None:
                found[id(kept)] = kept
                continue
            if current.made is None:
                return None
            stack.extend(read.value for read in current.made.reads)
        self._reached |= seen
        self.sources.update(found)
        for source in found.values():
            if isinstance(source, Kept):
                source.is_source = True
        return list(found.values())

    def result(self, value: Value) -> torch.Tensor:
        """Returns the contents of a value, rebuilding all that is pending if it is not there."""
        found: torch.Tensor | None = self.pending[value].result()
        if found is None:
            asked = [v for v, w in self.pending.items() if w and w.result() is None and not v.overwritten]
            with _torch.below_autocast_and_autograd(), execution_context.recomputing(), paused():
                found = self._rebuild({*asked, value})[value]
        return found

    def _rebuild(self, wanted: set[Value]) -> dict[Value, torch.Tensor]:
        """Runs every op that leads to `wanted` once, in the order of the forward; returns their contents."""
        here: dict[Value, torch.Tensor] = {}
        for value, waiting in self.pending.items():
            if (known := waiting.result()) is not None:
                here[value] = known
        ops: dict[int, tuple[Made, list[Value]]] = {}
        uses: dict[Value, int] = {}
        stack, seen = list(wanted), set(wanted)
        while stack:
            value = stack.pop()
            if value in here or value.constant is not None or value.alive() is not None:
                continue
            made = value.made
            if made is None:
                raise changed_since("a tensor that saved tensors are rebuilt from")
            if made.order in ops:
                ops[made.order][1].append(value)
                continue
            ops[made.order] = (made, [value])
            for read in made.reads:
                uses[read.value] = uses.get(read.value, 0) + 1
                if read.value not in seen:
                    seen.add(read.value)
                    stack.append(read.value)
        found: dict[Value, torch.Tensor] = {}
        for order in sorted(ops):
            made, values = ops[order]
            args = _decoded(made.args, here)
            kwargs = {key: _decoded((item,), here)[0] for key, item in made.kwargs.items()}
            out = made.function(*args, **kwargs)
            del args, kwargs
            for value in values:
                assert value.base is not None
                tensor = fitted(out[value.output] if isinstance(out, (tuple, list)) else out, value.base)
                here[value] = tensor
                if value in wanted:
                    found[value] = tensor
                del tensor
            del out
            for read in made.reads:
                uses[read.value] -= 1
                if not uses[read.value]:
                    here.pop(read.value, None)
            for value in values:
                if not uses.get(value):
                    here.pop(value, None)
        for value in wanted:
            if value not in found:  # kept by somebody by now
                found[value] = _contents(value, here)
            self.pending[value].hold(found[value])
        return found


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a parameter has its memory now, and will when its module runs backward (not so under ZeRO-3)."""
    return not hasattr(tensor, "ds_id") and (tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0)


def _decoded(items: Any, here: dict[Value, torch.Tensor]) -> list[Any]:
    """Returns an op's recorded arguments with tensors in the place of reads."""
    decoded: list[Any] = []
    for item in items:
        if isinstance(item, Read):
            decoded.append(laid(_contents(item.value, here), item.geometry))
        elif isinstance(item, (list, tuple)):
            decoded.append(_decoded(item, here))
        else:
            decoded.append(item)
    return decoded


def _contents(value: Value, here: dict[Value, torch.Tensor]) -> torch.Tensor:
    if value.constant is not None:
        return constant_contents(value)
    found = here.get(value)
    if found is not None:
        return found
    kept = value.alive()
    if kept is None:
        raise changed_since("a tensor that saved tensors are rebuilt from")
    contents: torch.Tensor = kept.contents().detach()
    return contents


class Rebuilt:
    """What autograd gets instead of a saved tensor: a value of a segment and the geometry it is wanted in."""

    __slots__ = ("__weakref__", "_counts", "_ticket", "_under", "_waiting", "geometry", "segment", "value")

    def __init__(self, value: Value, geometry: Geometry, segment: Segment, under: Surroundings) -> None:
        self._under = under
        self._counts = execution_context.current_counts()
        self.value = value
        self.geometry = geometry
        self.segment = segment
        self._waiting = segment.pending.setdefault(value, Waiting())
        self._ticket = self._waiting.add(self)

    def unpack(self) -> torch.Tensor:
        """Returns the tensor; raises if it was changed in place since it was saved, as autograd would.

        Under `retain_graph` it may be asked for again, and is rebuilt again.
        """
        if self.value.overwritten:
            size, _, _, dtype = self.geometry
            raise changed_since(f"{dtype} {list(size)}")
        if self._under.are_here():
            tensor = self.segment.result(self.value)
        else:
            with self._under.again():
                tensor = self.segment.result(self.value)
        self._waiting.serve(self._ticket)
        execution_context.count("num_rederived", self._counts)
        return laid(tensor, self.geometry)


class HeldRecorder(Recorder):
    """Records every op that can run again, and holds the results that a plan names.

    Attributes:
        segment: the one that ops run in now.
        num_ops: counted so far. lost: marks that met another op, in words.
    """

    is_cheap = False

    def __init__(self, marks: dict[tuple[str, int], dict[int, OpMark]]) -> None:
        super().__init__()
        self.segment = Segment()
        self._marks = marks
        self._held: list[Source] = []  # until forward ends: then those that something is rebuilt from stay
        self._leaves: dict[Value, Source] = {}
        self._calls: dict[str, int] = {}
        self._frames: list[_Frame] = []
        self.num_ops = 0
        self.lost: list[str] = []

    def enter(self, path: str) -> None:
        """Begins a call of the module at `path`: ops are its own until `leave`."""
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        self._frames.append(_Frame(path, self._marks.get((path, call))))

    def leave(self) -> None:
        """Ends the innermost call."""
        self._frames.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.paused or func.namespace == "prim" or _torch.is_higher_order(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        facts = op_facts(func)
        holds = facts.label != DETACH and self.before_op(facts.label)
        if facts.kind == OPAQUE and facts.can_rerun:
            made = self._made(facts, args, kwargs or {})
            out = func(*args, **(kwargs or {}))
            if made is not None:
                self._attach(made, out, has_side_results=True)
        else:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        if holds:
            self.hold(out)
        return out

    def _read(self, tensor: torch.Tensor) -> Read:
        read = super()._read(tensor)
        self.read_leaf(read.value, tensor)
        return read

    def _attach_one(self, made: Made, tensor: torch.Tensor, position: int) -> Value:
        found = self._existing(tensor)  # an op may return a view without its schema saying so
        return super()._attach_one(made, tensor, position) if found is None else found

    def pack(self, tensor: torch.Tensor, value: Value) -> Rebuilt | None:
        """Returns a `Rebuilt` where what is held leads to the tensor, None where it has to be kept."""
        if value.made is None or value.base is None or value.base[3] != tensor.dtype:
            return None
        if tensor.nbytes < MIN_BYTES or not self.deriving:
            return None
        sources = self.segment.reach(value)
        if sources is None:
            return None
        execution_context.rederived(tensor, [t for t in map(on_device, sources) if t is not None])
        return Rebuilt(value, geometry_of(tensor), self.segment, self.surroundings())

    def before_op(self, name: str) -> bool:
        """Counts an op of the innermost call; returns whether its results are held."""
        if not self._frames:
            return False
        self.num_ops += 1
        frame = self._frames[-1]
        ordinal, frame.ordinal = frame.ordinal, frame.ordinal + 1
        mark = frame.marks.get(ordinal) if frame.marks is not None else None
        if mark is None:
            return False
        if mark.op != name:
            self.lost.append(f"`{frame.path}`: op {ordinal} is {name}, was {mark.op}")
            return mark.holds
        if mark.begins_segment:
            self.segment = Segment()
            self._leaves.clear()
            self.deriving = not mark.saves
        return mark.holds

    def hold(self, out: Any) -> None:
        """Holds the results of an op."""
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                value = self.value_of(tensor)
                kept = value.alive()
                if value.constant is None and kept is None:
                    kept = keep(value, tensor)
                if kept is not None:
                    self._held.append(kept)

    def read_leaf(self, value: Value, tensor: torch.Tensor) -> None:
        """Holds, to the end of the segment at least, what an op reads and no op was seen to make."""
        if value.constant is None and value.made is None and value not in self._leaves:
            self._leaves[value] = value.alive() or keep(value, tensor)


def marks_of(marks: Sequence[OpMark]) -> dict[tuple[str, int], dict[int, OpMark]]:
    """Returns marks by module path and call, then by ordinal."""
    found: dict[tuple[str, int], dict[int, OpMark]] = {}
    for mark in marks:
        found.setdefault((mark.path, mark.call), {})[mark.ordinal] = mark
    return found


class _Frame:
    """One call that runs now: which of its own ops comes next."""

    __slots__ = ("marks", "ordinal", "path")

    def __init__(self, path: str, marks: dict[int, OpMark] | None) -> None:
        self.path = path
        self.marks = marks
        self.ordinal = 0


def keep(value: Value, tensor: torch.Tensor) -> Source:
    """Keeps a tensor's contents for who rebuilds from them; a random mask of zeros and ones as bytes."""
    if value.random_mask:
        kept: Source = compact_mask(value, tensor)
    else:  # ops are recorded below autograd, where a view does not count changes in place together with its base
        kept = Kept(tensor if tensor.grad_fn is None else _torch.alias_below_autograd(tensor))
    value.kept = weakref.ref(kept)
    return kept
