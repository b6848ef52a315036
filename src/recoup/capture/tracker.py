"""The dispatch mode that follows ops and storages through one step.

A storage is born at the op that first returns it and dies when the last reference goes (a weak reference tells): no
guess about lifetimes. Under fake tensors nothing is allocated and the lifetimes are the same, because autograd, the
model's own variables and the engine run as they always do.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from recoup import _torch
from recoup._interrupts import let_in
from recoup._pytree import argument_tensors, collect_tensors, iterate_tensors
from recoup._storages import dense_parts
from recoup.capture import repeats, sums
from recoup.capture.formulas import Formulas
from recoup.capture.function_calls import FunctionCalls
from recoup.capture.island import UNKNOWN, Island
from recoup.capture.last_op import LastOp
from recoup.capture.op_cache import FakeResults
from recoup.capture.records import Handle, OpRecord, StorageRecord
from recoup.capture.remade_views import RemadeViews
from recoup.errors import UsageError
from recoup.ir.trace import Category, Copy, Phase, Signature
from recoup.runtime import execution_context
from recoup.runtime.rebuild.cheap_ops import SILENT_WRITERS, op_facts

_UNANSWERED = _torch.fake_tensor_errors()
_DEVICE = torch.ops.prim.device.default


class Bridge(Protocol):
    """Replaces calls that are not run; see `folding`."""

    def takes(self, node: Any, func: Any, tensors: list[torch.Tensor], out: Any) -> bool:
        """Whether an op of backward belongs to a folded call, and is therefore not recorded."""


@_torch.without_dynamo_wrapper
class Tracker(_torch.dispatch_mode_class()):  # type: ignore[misc]
    """Records ops and storages.

    Attributes:
        phase, call: current phase of the step, and module call; set by the capture.
        on_outside: called where an op of the forward runs outside of all module calls.
        writes: (op, storage) pairs of arguments changed in place.
        random_ops: ops that drew random numbers.
        saves: (ops so far, call, storage, op that saves it) of each tensor that autograd keeps, in order.
        marks: before each op, how many storages were known and saved tensors rederived.
        counting: whether ops run without being recorded.
        num_looks: number of ops on real tensors, whose values may decide what the model does.
        unanswered: the first error of an op that fake tensors cannot answer, "" if there was none.
        bridge: the folding of loops' calls, if calls are folded.
        outside: category and name of tensors that the step reaches and that are not the model's, by storage address.
    """

    def __init__(
        self,
        *,
        island: Island | None,
        device: str = "cpu",
        round_bytes: int = 1,
        dialect: str = "cpu",
        results: FakeResults,
    ) -> None:
        super().__init__()
        self.ops: list[OpRecord] = []
        self._storages: list[StorageRecord] = []
        self.signatures: list[Signature] = []
        self.phase: Phase = "forward"
        self.draws_on_host: tuple[int, int] = (0, 0)
        self.call = -1
        self.on_outside: Callable[[], None] | None = None
        self.writes: list[tuple[int, int]] = []
        self.random_ops: list[int] = []
        self.save_ops: list[tuple[int, int]] = []
        self.rederive_links: list[tuple[int, list[int]]] = []
        self.num_rederived = 0
        self.copies: list[Copy] = []
        self.saves: list[tuple[int, int, int, int]] = []
        self.marks: list[tuple[int, int]] = []
        self.bridge: Bridge | None = None
        self.outside: dict[int, tuple[Category, str]] = {}
        self.recording = True
        self.counting = False
        self.num_looks = 0
        self.unanswered = ""
        self._island = island
        self._device_type = torch.device(device).type
        self._results = results
        self._round_bytes = round_bytes
        self.dialect = dialect
        self._keys: dict[Any, int] = {}
        self._signature_of: dict[Any, int] = {}
        self._handles: dict[int, Handle] = {}
        self._node_numbers: list[int] = []
        self._node_calls: list[int] = []
        self._backward_origin = (-1, -1)
        self._last_op = LastOp()
        self._remade_views = RemadeViews()
        self._functions, self._formulas = FunctionCalls(), Formulas()
        self._died: list[Handle] = []  # since the last op; storages die without Python, see `runtime.waiting`

    @property
    def storages(self) -> list[StorageRecord]:
        """The storages in order, with all that died so far."""
        self._bury()
        return self._storages

    @storages.setter
    def storages(self, storages: list[StorageRecord]) -> None:
        self._storages, self._died = storages, []  # who dies later has no record among these

    def _bury(self) -> None:
        last_op = len(self.ops) - 1
        while self._died:
            handle = self._died.pop()
            if self._handles.get(handle.address) is handle:
                del self._handles[handle.address]
            record = self._storages[handle.index]
            record.free_op = max(last_op, record.alloc_op) if handle.is_own else record.free_op

    @property
    def fake_mode(self) -> Any:
        """The mode that the step's fake tensors belong to; None for a real step."""
        return self._results.mode

    def add(self, tensor: torch.Tensor, category: Category, label: str) -> int:
        """Registers a tensor that was there before the step; returns its (last) storage's index, -1 without one."""
        return max((self._index(part, category, -1, label) for part in dense_parts(tensor)), default=-1)

    def add_block(self, nbytes: int, category: Category, label: str) -> None:
        """Registers bytes that are there all the time and belong to no tensor of this run."""
        if nbytes:
            self._storages.append(StorageRecord(nbytes, category, -1, len(self._storages), label))

    def find(self, tensor: torch.Tensor) -> int | None:
        """Returns the index of the tensor's storage if it is known; None for one that has none."""
        if tensor.layout is not torch.strided or _torch.is_wrapped(tensor) or _torch.is_wrapper_type(type(tensor)):
            return None
        storage = tensor.untyped_storage()
        handle = self._handles.get(storage._cdata)
        return handle.index if handle is not None and handle() is storage else None

    def holds_fakes(self) -> bool:
        """Whether a storage of a fake tensor is still alive."""
        found = (handle() for handle in list(self._handles.values()))
        return any(storage is not None and storage.device.type == "meta" for storage in found)

    def _index(self, tensor: torch.Tensor, category: Category, alloc_op: int, label: str) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        handle = self._handles.get(address)
        if handle is not None and handle() is storage:
            return handle.index
        nbytes = -(-storage.nbytes() // self._round_bytes) * self._round_bytes
        if self._device_type != "cpu" and _torch.device_type(tensor) != self._device_type:
            nbytes = 0  # a scalar on the host takes nothing of the device
        if alloc_op < 0 and category == "temporary":
            category, label = self.outside.get(address, (category, label))
        handle = self._handles[address] = Handle(storage, self._died.append, len(self._storages))
        self._storages.append(StorageRecord(nbytes, category, alloc_op, len(self._storages), label))
        return handle.index

    def _indices(self, tensors: list[torch.Tensor], alloc_op: int, label: str) -> tuple[int, ...]:
        """Returns the indices of an op's storages; those that are new are noted as made by `alloc_op`."""
        found = []
        for tensor in tensors:
            if tensor.layout is torch.strided and _torch.is_fake(tensor):
                found.append(self._index(tensor, "temporary", alloc_op, label))
            else:
                found += [self._index(part, "temporary", alloc_op, label) for part in dense_parts(tensor)]
        return tuple(found)

    def saved(self, tensor: torch.Tensor) -> None:
        """Notes that autograd keeps the tensor for the current call."""
        if not self.recording:
            return
        if tensor.layout is not torch.strided or _torch.is_wrapper_type(type(tensor)):
            for part in dense_parts(tensor):
                self.saved(part)
            return
        index = self.find(tensor)
        if index is None:  # the op that saves it is the first to read it
            index = self._index(tensor, "temporary", -1, "")
        if index is not None and self.phase in ("forward", "loss"):
            record = self._storages[index]
            self.save_ops.append((len(self.ops), self.call))
            packing_op = self._packing_op(tensor)
            self.saves.append((len(self.ops), self.call, index, packing_op))
            record.save(packing_op, self.call)

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        """Takes no note of ops and saved tensors inside the block."""
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before

    def _packing_op(self, tensor: torch.Tensor) -> int:
        """Returns the op that saves `tensor` now: an input is packed before its op is dispatched, an output after."""
        index = self.find(tensor)
        last = len(self.ops) - 1
        if last < 0 or index is None or self.ops[last].call != self.call:
            return last + 1
        is_fresh = self._storages[index].alloc_op == last
        mine = self._last_op.saves(lambda made: self.find(made) == index, is_fresh=is_fresh)
        return last if mine else last + 1

    def rederived(self, tensor: torch.Tensor, sources: list[torch.Tensor]) -> None:
        """Notes that a saved tensor will be rebuilt from `sources`, for the call and op that save it now."""
        self.num_rederived += 1
        if self.phase in ("forward", "loss"):
            found = [i for i in map(self.find, sources) if i is not None]
            self.rederive_links.append((self._packing_op(tensor), found))

    # -- ops ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and _torch.is_fake(args[0]):
            return _torch.fake_device(args[0])  # asked about twice an op
        if any(map(_torch.is_wrapper_type, types)):
            return NotImplemented  # its own ops come next, on what it is made of
        kwargs = kwargs or {}
        if _torch.is_higher_order(func):
            out = func(*args, **kwargs)  # the ops inside see no mode: what comes out was made by the op before
            for tensor in filter(_is_plain, iterate_tensors(out)):
                self._index(tensor, "temporary", len(self.ops) - 1, str(func))
            return out
        if not self.recording:
            return func(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        collect_tensors((*args, *kwargs.values()) if kwargs else args, tensors)
        func = self._formulas.on_real(func, args) if self.phase == "backward" else func
        try:
            out = self._run(func, args, kwargs, tensors)
        except _UNANSWERED as error:
            self.unanswered = self.unanswered or f"{type(error).__name__}: {error}"
            raise
        if func.namespace == "prim" or self.counting:  # questions about a tensor's device and the like
            return out
        if self.phase == "backward":
            node = self._formulas.note(func, out)
            if node is not None and self.bridge is not None and self.bridge.takes(node, func, tensors, out):
                return out
        self._record(func, args, kwargs, tensors, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        self._results.key = None
        island = self._island
        if island is None:
            return func(*args, **kwargs)
        if island.knows(tensors):
            self.num_looks += bool(tensors)
            out = island.run(func, args, kwargs, tensors)
            if out is not UNKNOWN:
                return out
        else:
            island.forget(func, args, kwargs)
            args = island.counted(func, args)
        return self._results.run(func, args, kwargs) if any(map(_torch.is_fake, tensors)) else func(*args, **kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], out: Any) -> None:
        if self.call < 0 and self.on_outside is not None and self.phase == "forward":
            self.on_outside()
        let_in()  # not where a question about a tensor is answered, which must not raise
        index = len(self.ops)
        self.marks.append((len(self._storages), self.num_rederived))
        inputs = self._indices(tensors, -1, "made before the step")
        outputs: list[torch.Tensor] = []
        collect_tensors(out if isinstance(out, (tuple, list)) else (out,), outputs)
        name = func._schema.name
        if any(t.is_nested for t in outputs):
            raise UsageError(
                f"The step makes a nested tensor ({name}), whose sizes differ from batch to batch and cannot be "
                "planned for. Compute on a padded tensor, or on `values()` and `offsets()`; `recoup.rederive()` needs "
                "no plan and takes them."
            )
        call, origin = self._origin(index)
        of_plain = func.is_view and tensors and _is_plain(tensors[0]) and _torch.is_fake(outputs[0])
        if of_plain and tensors[0].untyped_storage()._cdata in self.outside:
            # Fakes of what is real, and there once: a weight that is not the model's, transposed.
            storage = outputs[0].untyped_storage()
            self._handles[storage._cdata] = Handle(storage, self._died.append, inputs[0], is_own=False)
        new = self._indices(outputs, index, name)
        signature = self._signature(func, args, kwargs, out)
        self._bury()
        where = call, origin, self.phase, execution_context.is_recomputing()
        begins = self._functions.begins(self.phase, self.call)
        made = self._storages[inputs[0]].alloc_op if inputs and self.phase == "backward" else -1
        kind = sums.kind_of_sum(func, tensors, self.ops[made], node=origin) if made >= 0 else ""
        self.ops.append(OpRecord(signature, *where, inputs, new, begins, kind))
        if self.phase in ("forward", "loss"):
            self._last_op.note(func, outputs)
            self._remade_views.note(index, func, outputs)
        facts = op_facts(func)
        if facts.written or facts.written_names:
            self._note_writes(facts, index, args, kwargs)
        short = name.rsplit("::", 1)[-1]
        if short in SILENT_WRITERS:
            for position in SILENT_WRITERS[short]:
                if position < len(args) and isinstance(args[position], torch.Tensor) and any(a is True for a in args):
                    self.writes.append((index, self._index(args[position], "buffer", -1, name)))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random_ops.append(index)

    def mark(self) -> int:
        """Records a mark in place of skipped ops, as an op of its own; returns its index."""
        index = len(self.ops)
        self.marks.append((len(self._storages), self.num_rederived))
        self._functions = FunctionCalls()
        call, origin = self._origin(index)
        self._bury()
        self.ops.append(OpRecord(-1, call, origin, self.phase, False, (), (), True))
        return index

    def place(self) -> repeats.Place:
        """Returns how far it has come."""
        return repeats.place_of(self)

    def repeat(self, places: Sequence[repeats.Place], times: int) -> bool:
        """Appends copies of the last tile, if the last two are equal; see `repeats`."""
        return repeats.repeat(self, places, times)

    def add_like(self, first: repeats.Place, end: repeats.Place, moving: Sequence[repeats.Moving], number: int) -> None:
        """Appends a copy of the recording between two places, shifted by `number` tiles."""
        num_ops, num_storages = end.num_ops - first.num_ops, end.num_storages - first.num_storages
        for record in self._storages[first.num_storages : end.num_storages]:
            self._storages.append(record.moved(number * num_ops, len(self._storages)))
        for op, moved in zip(self.ops[first.num_ops : end.num_ops], moving, strict=True):
            self.ops.append(moved.moved(op, number))
            if self.phase != "backward":
                self._node_numbers.append(_torch.next_node_number())
                self._node_calls.append(self.call)
        marks = self.marks[first.num_ops : end.num_ops]
        self.marks += [(known + number * num_storages, num_rederived) for known, num_rederived in marks]

    def hand_on(self, successors: dict[int, int]) -> None:
        """Gives living storages other indices, {old: new}: the copies' last ones, which live on."""
        for handle in self._handles.values():
            if handle.index in successors:
                handle.index = successors[handle.index]
                self._storages[handle.index].free_op = -1

    def _signature(self, func: Any, args: Any, kwargs: Any, out: Any) -> int:
        known = self._results.key
        index = self._signature_of.get(known) if known is not None else None
        if index is None:
            key, signature = self._results.signature(func, args, kwargs, out, self._device_type)
            index = self._keys.get(key)
            if index is None:
                index = self._keys[key] = len(self.signatures)
                self.signatures.append(signature)
            if known is not None:
                self._signature_of[known] = index
        return index

    def _note_writes(self, facts: Any, index: int, args: Any, kwargs: Any) -> None:
        for tensor in argument_tensors(facts.written_arguments(args, kwargs)):
            if _is_plain(tensor):
                self.writes.append((index, self._index(tensor, "temporary", -1, "")))
                self._remade_views.note_write(tensor)

    def begin_backward(self, loss: torch.Tensor) -> None:
        """Notes that the backward of `loss` comes next."""
        self.phase = "backward"
        self._remade_views.copy_gradients(loss, self._node_numbers)

    def _origin(self, index: int) -> tuple[int, int]:
        """Returns the call the op that runs now belongs to, and the forward op it stems from."""
        if self.phase in ("forward", "loss"):
            self._node_numbers.append(_torch.next_node_number())
            self._node_calls.append(self.call)
            return self.call, index
        if self.phase != "backward":
            return -1, -1
        node = _torch.current_backward_node()
        if node is None:
            return -1, -1
        number = _torch.node_number(node)
        if number < 2**63:  # leaf accumulators have the largest number: they go with the node before them
            position = bisect.bisect_right(self._node_numbers, number)
            if position < len(self._node_calls):
                self._backward_origin = (self._node_calls[position], position)
        return self._backward_origin


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided
