"""Which cheap op made which storage: the record that lets a saved tensor be rebuilt instead of kept.

[Note: lineage]
1. A `Value` is the contents of one storage at one moment. An op that writes into a storage gives it a new value.
2. While a `Recorder` is on the dispatch-mode stack, each cheap op leaves a `Made`: the overload, its scalars, and the
   values that it read, each with the geometry of the view it read.
3. A view is geometry over a value. View ops leave no record.
4. The record holds no tensor. A value knows its contents only while they are kept elsewhere (`Kept`), or if they are a
   parameter's.
5. The record is made anew in every step, from the arguments that the kernels got: no rebuilt tensor can rest on a
   stale scalar, eps or shape.

Example: `y = gelu(x).view(4, -1)`, with x kept because gelu itself saves it. The storage of gelu's result gets a value
whose `made` is gelu's overload, reading the value of x; `y` is that value with another geometry. When a matmul saves
`y`, autograd gets a `Rederived` instead: the value, y's geometry, and x's `Kept`. If `x.add_(1)` runs before backward,
x's storage has a new value, and unpacking raises as autograd would.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.runtime import execution_context
from recoup.runtime.rebuild import dropout
from recoup.runtime.rebuild.cheap_ops import CHEAP, IN_PLACE, OpFacts, has_history, known_facts, op_facts
from recoup.runtime.rebuild.constant import Constant
from recoup.runtime.rebuild.surroundings import Surroundings
from recoup.runtime.rebuild.values import PLAIN, Geometry, Made, Read, Value, geometry_of


class _Current(threading.local):
    recorder: Recorder | None = None


current = _Current()


def current_recorder() -> Recorder | None:
    """Returns the recorder that is on for this thread, if it is not paused."""
    recorder = current.recorder
    return recorder if recorder is not None and not recorder.paused else None


@_torch.without_dynamo_wrapper
class Recorder(_torch.dispatch_mode_class()):  # type: ignore[misc]
    """The dispatch mode that records lineage; `paused` it only watches for writes.

    `deriving` says whether what is saved now may be rederived, or is kept (and serves others as a source).
    `is_cheap`: only cheap ops run again, so that few flags of kernels count.
    `is_aside`: set before it is entered, for a step whose ops are known: none come to it until `step_in`.
    `watch`: the `CallWatch` of a step that follows a program; its `passes` is to be told of each patched module that is
    entered (its path) or left (None), but for those at the paths in `untold`. `inside`: the settings of all that are
    open.
    `offloading`: whether what is kept now goes to the host, by way of `offloader`, if the plan offloads anything.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paused = 0
        self.deriving = True
        self.offloading = False
        self.offloader: Any = None
        self.is_aside = self._is_on = False
        self.call: Any = None
        self.program: Any = None
        self.learning: Any = None
        self.watch: Any = None
        self.untold: frozenset[str] = frozenset()
        self.inside: list[Any] = []
        self.num_made = 0
        self.packed: list[weakref.ref[Any]] = []  # what autograd got for each saved tensor, unless `is_cheap`
        self.turn = 0  # counts saved tensors: backward asks about in reverse
        self._first_node = 0
        self._values: dict[weakref.ref[torch.UntypedStorage], Value] = {}  # of live storages; see `waiting.py`
        self._outer: Recorder | None = None
        self._surroundings = Surroundings((), is_cheap=self.is_cheap)

    supports_higher_order_operators = True
    is_cheap = True

    def __enter__(self) -> Recorder:
        self._outer = current.recorder
        self._first_node = _torch.sequence_number()
        current.recorder = self
        if not self.is_aside:
            super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if not self.is_aside:
            super().__exit__(*exc)
        elif self._is_on:
            self._is_on = False
            _torch.put_off(self)
        self._values.clear()
        current.recorder = self._outer
        self._outer = None

    def enter(self, path: str) -> None:
        """Notes, in a step that follows no program, that the patched module at `path` is entered."""
        if self.learning is not None:
            self.learning.passes(path)

    def leave(self) -> None:
        """Notes that the innermost patched module is left."""
        if self.learning is not None:
            self.learning.passes(None)

    def step_in(self) -> None:
        """Has the ops that come recorded, if it stood aside."""
        if self.is_aside and not self._is_on:
            self._is_on = True
            _torch.put_on_below(self)

    def step_aside(self) -> None:
        """Undoes `step_in`."""
        if self._is_on:
            self._is_on = False
            _torch.put_off(self)

    def surroundings(self) -> Surroundings:
        """Returns the surroundings of the ops recorded now."""
        modes = _torch.user_modes_below(self)
        if modes != self._surroundings.modes:
            self._surroundings = Surroundings(modes, is_cheap=self.is_cheap)
        return self._surroundings

    # -- values -------------------------------------------------------------------------------------------------

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Returns the value of the tensor's storage, a new one without history if it was not seen yet."""
        storage = tensor.untyped_storage()
        known = self._values.get(weakref.ref(storage))
        if known is not None:
            return known
        value = Value()
        base = tensor if isinstance(tensor, nn.Parameter) else tensor._base
        if isinstance(base, nn.Parameter) or (base is not None and _torch.is_sharded_parameter(base)):
            # A view of a parameter is as constant as itself; FSDP1's weights are views of what it takes away.
            value.constant = Constant(base)
        self._set(storage, value)
        return value

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Whether what autocast made of a parameter was made in this step; it keeps it as long as it is on."""
        return _torch.made_since(tensor, self._first_node)

    def set_value(self, tensor: torch.Tensor, value: Value) -> None:
        """Sets the value of the tensor's storage, for one that no op was seen to make."""
        values = self._values
        values[weakref.ref(tensor.untyped_storage(), values.pop)] = value

    def _set(self, storage: torch.UntypedStorage, value: Value) -> None:
        self._values[weakref.ref(storage, self._values.pop)] = value

    def existing(self, tensor: torch.Tensor) -> Value | None:
        """Returns the value of the tensor's storage, None if it was not seen yet or the tensor is sparse."""
        return self._values.get(weakref.ref(tensor.untyped_storage())) if tensor.layout is torch.strided else None

    # -- recording ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(map(_torch.is_wrapper_type, types)):
            return NotImplemented  # its own ops come next, on what it is made of
        facts = known_facts(id(func))
        if facts is None:
            if func is torch.ops.prim.device.default and _torch.is_fake(args[0]):
                return _torch.fake_device(args[0])  # while a step is captured, twice an op
            if _torch.is_higher_order(func):
                return func(*args, **(kwargs or {}))
            facts = op_facts(func)
        kwargs = kwargs or {}
        if facts.is_inert or (self.paused and facts.kind == CHEAP):
            out = func(*args, **kwargs)
            if facts.is_dropout and not self.paused:
                self.note_dropout(args, out)
            return out
        if facts.kind == CHEAP:
            made = self._made(facts, args, kwargs)
            statistics: list[torch.Tensor] = []
            if facts.is_batch_norm and len(args) > 5 and args[5]:  # it updates them, though its schema does not say so
                statistics = [a for a in args[3:5] if isinstance(a, torch.Tensor) and self.existing(a) is not None]
            for tensor in statistics:
                self.rescue(tensor)
            out = func(*args, **kwargs)
            for tensor in statistics:
                self._replace(tensor, Value())
            if made is not None:
                self._attach(made, out, facts.is_batch_norm or facts.pooled_dims > 0)
            return out
        return self._write(facts, func, args, kwargs)

    def _made(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made | None:
        if facts.allocates and _torch.inside_custom_function():
            return None  # for a kernel of the user's, which nobody sees write
        if facts.is_batch_norm and len(args) > 5 and args[5]:
            # Training: the output depends on the batch alone; without the buffers nothing is updated twice.
            args = (*args[:3], None, None, *args[5:])
        reads: list[Read] = []
        recorded = self._encode(args, reads)
        if recorded is None:
            return None
        self.num_made += 1
        if not kwargs:
            is_flat = len([a for a in recorded if type(a) is Read]) == len(reads)
            return Made(facts.function, recorded, kwargs, reads, is_flat, self.num_made)
        values = self._encode(kwargs.values(), reads)
        if values is None:
            return None
        return Made(facts.function, recorded, dict(zip(kwargs, values, strict=True)), reads, False, self.num_made)

    def note_dropout(self, args: tuple[Any, ...], out: Any) -> Made | None:
        """Notes that a dropout's result follows from what it reads and its mask; returns how, None if it does not."""
        x = args[0]
        scale = dropout.scale_of(x.dtype, execution_context.device_type(x), args[1:])
        if scale is None or not all(map(has_history, out)):
            return None
        self.value_of(out[1]).base = geometry_of(out[1])
        made = self._made(op_facts(dropout.MADE_BY), (x, out[1], scale), {})
        if made is not None:
            self._attach_one(made, out[0], 0)
        return made

    def _encode(self, items: Iterable[Any], reads: list[Read]) -> tuple[Any, ...] | None:
        """Returns `items` with tensors replaced by reads, or None if one of them cannot be recorded."""
        result: list[Any] = []
        for item in items:
            kind = type(item)
            if kind in PLAIN:
                result.append(item)
            elif kind is torch.Tensor or isinstance(item, torch.Tensor):
                if not has_history(item) or item.is_neg() or item.is_conj():
                    return None
                value = self._values.get(weakref.ref(item.untyped_storage()))
                if value is None:
                    value = self.value_of(item)
                if value.made is None and value.constant is None:
                    self.read_leaf(value, item)
                base, dtype = value.base, item.dtype
                if base is not None and base[3] is not dtype:
                    return None  # the same bytes read as another dtype
                read = Read(value, (item.size(), item.stride(), item.storage_offset(), dtype))
                reads.append(read)
                result.append(read)
            elif isinstance(item, (list, tuple)):
                inner = self._encode(item, reads)
                if inner is None:
                    return None
                result.append(inner if isinstance(item, tuple) else list(inner))
            else:
                result.append(item)
        return tuple(result)

    def read_leaf(self, value: Value, tensor: torch.Tensor) -> None:
        """Called for what a recorded op reads and no op was seen to make."""

    def pack(self, tensor: torch.Tensor, value: Value) -> Any | None:
        """Returns a replacement for a saved tensor that is not kept yet; None: it is rederived or kept."""
        return None

    def _attach(self, made: Made, out: Any, has_side_results: bool) -> None:
        """Notes how results were made, of those that can have a history."""
        if isinstance(out, torch.Tensor):
            if has_history(out):
                self._attach_one(made, out, 0)
            return
        values = []
        for position, tensor in enumerate(out):
            if not isinstance(tensor, torch.Tensor) or not has_history(tensor):
                continue
            if position > 0 and not has_side_results and tensor.numel() * 16 <= out[0].numel():
                made.written.append(geometry_of(tensor))
                continue  # a norm's statistics: too small to be worth a rebuild
            values.append(self._attach_one(made, tensor, position))
        if len(values) == len(out):
            made.outputs = tuple(weakref.ref(value) for value in values)

    def _attach_one(self, made: Made, tensor: torch.Tensor, position: int) -> Value:
        value = Value()
        value.made = made
        value.output = position
        value.base = base = geometry_of(tensor)
        made.written.append(base)
        self._set(tensor.untyped_storage(), value)
        return value

    def _write(self, facts: OpFacts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op that changes arguments and gives the changed storages new values."""
        made, base = (None, None) if self.paused else self._rewriting(facts, args, kwargs)
        targets = [args[i] for i in facts.written if i < len(args)]
        targets += [kwargs[name] for name in facts.written_names if name in kwargs]
        items = [t for target in targets for t in (target if isinstance(target, (list, tuple)) else (target,))]
        written = [p for t in items if isinstance(t, torch.Tensor) for p in (_torch.sparse_parts(t) or (t,))]
        for tensor in written:
            self.rescue(tensor)
        out = func(*args, **kwargs)
        for tensor in written:
            value = Value()
            if made is not None:
                value.made = made
                value.base = base
                made.written.append(geometry_of(tensor))
            elif facts.is_random_mask and tensor.nbytes == tensor.untyped_storage().nbytes():
                value.random_mask = True
                value.base = geometry_of(tensor)
            elif facts.draws and tensor.nbytes == tensor.untyped_storage().nbytes():
                value.base = geometry_of(tensor)
            elif facts.written_names:  # `out=`: a buffer, and the next forward may come before this one's backward
                value.is_passing = True
            self._replace(tensor, value)
        return out

    def _rewriting(
        self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Made | None, Geometry | None]:
        """Returns how to make what an op is about to write into a storage again, and what geometry that has."""
        target = args[0] if facts.kind == IN_PLACE else None
        if (
            isinstance(target, torch.Tensor)
            and has_history(target)
            and target.numel() * target.dtype.itemsize == target.untyped_storage().nbytes()
            and all(a.dtype == target.dtype for a in args if isinstance(a, torch.Tensor))
        ):
            return self._made(facts, args, kwargs), geometry_of(target)
        return None, None

    def rescue(self, tensor: torch.Tensor) -> None:
        """Copies what is about to be overwritten, if something is to be rebuilt from it: plain would have kept that."""
        old = self.existing(tensor)
        for holder in () if old is None else (old.constant, old.alive()):
            if holder is not None:
                holder.rescue()

    def _replace(self, tensor: torch.Tensor, value: Value) -> None:
        """Gives a storage that was written to its new value."""
        old = self.existing(tensor)
        if old is not None:
            written = geometry_of(tensor)
            old.overwritten += (written,)
            kept = old.alive()
            if kept is None or not kept.is_rescued(written):  # a write through `.data` leaves the version as it was
                old.kept = None
            if old.constant is not None and old.constant.copy is None:
                old.constant = None
        storage = tensor.untyped_storage()
        if isinstance(tensor, nn.Parameter):
            self._values.pop(weakref.ref(storage), None)  # its version counts up only after this
        else:
            self._set(storage, value)
