"""A captured training step: calls, ops, storages with lifetimes, saved tensors.

Time is counted in ops: the op at position `i` of `Trace.ops` happens at time `i`. A storage is alive *during* every
op `i` with `alloc_op <= i <= free_op`. `alloc_op == -1` means it was there before the step, `free_op == len(ops)`
that it outlives it.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

Phase = Literal["forward", "loss", "backward", "optimizer"]
Number = TypeVar("Number", int, float)
Category = Literal["parameter", "buffer", "outside", "gradient", "optimizer", "batch", "saved", "temporary"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape, stride, dtype and device of a tensor argument, enough to make one like it.

    `device` is "" on the step's own device, "cpu" for what a step on a GPU keeps on the host.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One distinct op: a name with its overload and its arguments, tensors replaced by `TensorSpec`.

    `args` and `kwargs` are nests of TensorSpec, int, float, bool, None, str (`"dtype:float32"`, `"device:cpu"`,
    `"layout:strided"`, `"memory_format:..."` stand for torch objects), lists and tuples.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    flops: int
    bytes_moved: int
    output_bytes: int
    is_view: bool


# A capture makes ten thousands of these two. Nobody changes them; frozen, each would take four times as long to make.
@dataclasses.dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Op:
    """One dispatched op of the step.

    Attributes:
        call: index into `Trace.calls` of the innermost call it belongs to; in backward, the call whose forward made
            the node that runs. -1: none (loss outside the model, optimizer).
        origin: the forward op whose node runs this backward op; its own position in forward; -1 elsewhere.
        replayed: whether it is the second run of a forward op (a region's replay, or a rederived tensor).
        inputs: indices of the storages it reads.
        outputs: indices of the storages of its results; one that is not in `inputs` and whose `alloc_op` is this op
            is new.
        begins_call: whether it is the first op of a call of a torch function (in forward).
    """

    signature: int
    call: int
    origin: int
    phase: Phase
    replayed: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    begins_call: bool = True


@dataclasses.dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Storage:
    """One block of memory and when it lives.

    Attributes:
        category: "outside" is what is there before the step and is neither the model's own nor the batch's.
        released_op: the last op during which it would live if autograd kept nothing (forward storages only; equals
            `free_op` elsewhere).
        saved_ops: the forward ops with which autograd keeps it, in order.
        saved_by: calls that save a tensor in it, in order of first saving (may hold -1 for the loss).
        label: for people: the parameter's path, or op and call that made it.
        source: "file:line" of the code that made it, "" where that is not known or it is small.
    """

    nbytes: int
    category: Category
    alloc_op: int
    free_op: int
    released_op: int
    saved_ops: tuple[int, ...]
    saved_by: tuple[int, ...]
    label: str
    source: str = ""

    @property
    def saved_op(self) -> int:
        """The op with which autograd first keeps it as an input, or as the result; -1: it does not."""
        takers = (op for op in self.saved_ops if op != self.alloc_op)  # it is kept longer for them
        return next(takers, self.saved_ops[0] if self.saved_ops else -1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One execution of a module's forward.

    Attributes:
        path: dotted module path ("" is the model itself).
        index: how many times that path was called before.
        first_op: first op of its forward.
        last_op: one past the last op of its forward.
        inputs: storages of its argument tensors.
        input_numel: elements of its argument tensors.
        outputs: storages of its result tensors.
        input_grad_bytes: bytes of the gradients of its arguments.
        output_grad_bytes: bytes of the gradients of its results.
        replay_stop_op: a replay runs ops [first_op, replay_stop_op): then the last thing that autograd keeps is there;
            -1 if it keeps nothing.
        refusal: why no region may begin with it ("" if one can).
        runs_once: it is in no region and in no tile, whoever begins them: what it does must not happen twice.
        chained: its only tensor input that needs a gradient is exactly the previous sibling's whole output.
    """

    path: str
    index: int
    kind: str
    parent: int
    children: tuple[int, ...]
    first_op: int
    last_op: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_grad_bytes: int
    output_grad_bytes: int
    replay_stop_op: int
    refusal: str
    mutated_buffers: tuple[str, ...]
    draws_random: bool
    chained: bool
    runs_once: bool = False
    input_numel: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MethodCall:
    """One execution of another method than forward, of the model or a part of it, outside of all calls.

    Attributes:
        path: dotted module path ("" is the model itself).
        first_op: first op in it.
        last_op: one past the last op in it.
        input_numel: elements of its argument tensors.
        num_calls_before: calls of modules that began before it.
    """

    path: str
    method: str
    first_op: int
    last_op: int
    input_numel: int
    num_calls_before: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One event in the life of a storage that is moved to the host.

    Attributes:
        op: it happens before this op.
        kind: "out" begins to move it away, "back" to bring it back, "wait" is where the step needs it there again.
        block: the same for all events of one storage.
        storage: what is moved "out", by its index, -1 if unknown.
    """

    op: int
    kind: Literal["out", "back", "wait"]
    block: int
    nbytes: int
    storage: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One captured step.

    Attributes:
        source: "fake" (nothing was allocated) or "real" (a real step was run, for `reason`).
        device: what the step was captured for.
        fingerprint: of the model's structure; a plan is refused on a model with another one.
        rederive_links: (op, storages): the op saves a tensor that will be rebuilt from what these storages keep.
        num_rederived: saved tensors that will be rebuilt, those of replays included.
        copies: what offload moves, in order.
        notes: sentences for people about what was estimated.
        draws_on_host: numbers of 32 bits that the step draws of python's and of numpy's random stream, as layers that
            are dropped do.
        precisions: dtypes that modules with weights compute in.
        optimizer_host_bytes: of the optimizer's state, on the host but for its step.
        num_saved: tensors that autograd saves in calls of the model, its modules and their methods.
        method_calls: those outside of all calls.
    """

    source: Literal["fake", "real"]
    reason: str
    device: str
    fingerprint: str
    model_class: str
    num_parameters: int
    grad_mode_default_loss: str
    signatures: tuple[Signature, ...]
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    calls: tuple[Call, ...]
    rederive_links: tuple[tuple[int, tuple[int, ...]], ...] = ()
    num_rederived: int = 0
    copies: tuple[Copy, ...] = ()
    notes: tuple[str, ...] = ()
    draws_on_host: tuple[int, int] = (0, 0)
    precisions: tuple[str, ...] = ()
    optimizer_host_bytes: int = 0
    num_saved: int = 0
    method_calls: tuple[MethodCall, ...] = ()

    def levels(self, workspace_bytes: tuple[int, ...] | None = None) -> list[int]:
        """Returns the bytes alive during each op, hidden workspace of the op included when given."""
        num_ops = len(self.ops)
        change = [0] * (num_ops + 2)
        for storage in self.storages:
            change[max(storage.alloc_op, 0)] += storage.nbytes
            change[min(storage.free_op, num_ops) + 1] -= storage.nbytes
        levels, level = [], 0
        for i in range(num_ops):
            level += change[i]
            levels.append(level + (workspace_bytes[i] if workspace_bytes else 0))
        return levels

    @property
    def num_collectives(self) -> int:
        """Collectives that the step runs, those of distributed tensors; waiting for one is none."""
        names = (self.signatures[op.signature].name for op in self.ops if op.signature >= 0)
        return sum(name.startswith("_c10d_functional.") and "wait_tensor" not in name for name in names)

    def host_peak_bytes(self) -> int:
        """Returns the most bytes that are on the host at a time: a storage is from its way out to its last event."""
        last = {copy.block: at for at, copy in enumerate(self.copies)}
        held = peak = 0
        for at, copy in enumerate(self.copies):
            held += copy.nbytes if copy.kind == "out" else 0
            peak = max(peak, held)
            held -= copy.nbytes if last[copy.block] == at else 0
        return peak + self.optimizer_host_bytes

    @property
    def num_forward_ops(self) -> int:
        """Ops of forward and loss: backward begins with the op after them."""
        return bisect.bisect(self.ops, False, key=lambda op: op.phase not in ("forward", "loss"))

    def held_storages(self) -> list[Storage]:
        """Returns the storages that autograd holds when backward begins, parameters and batch left out."""
        begin = self.num_forward_ops
        return [s for s in self.storages if s.category == "saved" and s.alloc_op < begin <= s.free_op]

    @property
    def held_bytes(self) -> int:
        """Bytes of what autograd holds when backward begins, parameters and batch left out."""
        return sum(s.nbytes for s in self.held_storages())

    def depths(self) -> list[int]:
        """Returns how many calls are around each call."""
        depths: list[int] = []
        for call in self.calls:  # parents come before their children
            depths.append(depths[call.parent] + 1 if call.parent >= 0 else 0)
        return depths

    def with_children(self, own: Sequence[Number]) -> list[Number]:
        """Returns a quantity of each call with those of all calls inside it added, from each call's own."""
        total = list(own)
        for i in range(len(self.calls) - 1, -1, -1):  # children come after their parents
            parent = self.calls[i].parent
            if parent >= 0:
                total[parent] += total[i]
        return total

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return dataclasses.asdict(self)

    def save(self, path: str | Path) -> None:
        """Writes the trace as JSON."""
        Path(path).write_text(json.dumps(self.to_json()))
