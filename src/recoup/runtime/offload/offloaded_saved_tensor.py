"""Saved tensors that a plan's `offload` moves away from the device, as the record of lineage holds them.

A storage is moved once, as a whole, when autograd first saves a tensor over it. It comes back once for all its readers:
saved tensors over it, and saved tensors that are rebuilt from it. It is freed when the last of them has been served.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from recoup._allocation import LARGE_BLOCK_BYTES
from recoup.runtime import execution_context
from recoup.runtime.offload.transport import Transport, make_transport
from recoup.runtime.rebuild.values import Geometry, Value, geometry_of
from recoup.runtime.waiting import Waiting

MIN_BYTES = LARGE_BLOCK_BYTES
"""Smaller storages stay: a freed one is not given back to the system, and asking takes longer than the copy."""
_MAX_UNUSED_RATIO = 8  # a storage more than so many times the size of the saved slice is not moved as a whole


class Moves:
    """Totals of what the plan in place on a model has moved since it was applied.

    Attributes:
        bytes_out: bytes moved to the host.
        bytes_back: bytes moved back.
        num_blocks: number of storages moved out.
    """

    def __init__(self) -> None:
        self.bytes_out = 0
        self.bytes_back = 0
        self.num_blocks = 0


class Offloading:
    """State shared by the steps of one model: the transport, made when something is first moved, and the totals.

    Args:
        transport: see `recoup.offload`; "auto": pinned memory for a GPU, a file without a name otherwise.
    """

    def __init__(self, transport: Transport | str = "auto") -> None:
        self.moves = Moves()
        self.wanted = transport
        self._made: Transport | None = None

    def begin(self, model: nn.Module, inputs: Iterable[torch.Tensor]) -> StepOffloader:
        """Returns the offloader of one step; `inputs`, which the model's caller holds anyway, are never moved."""
        stays = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        stays.update(t.untyped_storage()._cdata for t in inputs if t.layout is torch.strided)
        return StepOffloader(self, stays)

    def transport(self, device: torch.device) -> Transport:
        """Returns the transport: a stand-in while a step is captured, otherwise the requested one."""
        stand_in = execution_context.stand_in_transport()
        if stand_in is not None:
            return stand_in  # type: ignore[no-any-return]
        if self._made is None:
            self._made = make_transport(device, self.wanted)
        return self._made

    def close(self) -> None:
        """Drops the transport; graphs with offloaded tensors keep it until these have been read."""
        self._made = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Offloading:
        return Offloading(self.wanted if isinstance(self.wanted, str) else "auto")

    def __reduce__(self) -> Any:
        return Offloading, (self.wanted if isinstance(self.wanted, str) else "auto",)


class StepOffloader:
    """Moves the saved tensors of one step that a decision offloads."""

    def __init__(self, shared: Offloading, stays: set[int]) -> None:
        self._shared = shared
        self._stays = stays
        self._last: weakref.ref[MovedStorage] | None = None
        self._group = 0

    def begin_group(self) -> None:
        """Begins a group: the storages that one call or one region moves. Backward prefetches one group ahead."""
        self._group += 1

    def take(self, value: Value, tensor: torch.Tensor) -> KeptElsewhere | None:
        """Moves the tensor's storage and returns a handle on its contents; None if it stays on the device."""
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        own_bytes = tensor.numel() * tensor.dtype.itemsize
        if nbytes < MIN_BYTES or nbytes > _MAX_UNUSED_RATIO * own_bytes or nbytes % tensor.dtype.itemsize:
            return None
        if storage._cdata in self._stays:
            return None
        before = self._last() if self._last is not None else None
        moved = MovedStorage(
            flat_bytes(tensor), self._shared.transport(tensor.device), self._shared.moves, before, self._group
        )
        self._last = weakref.ref(moved)
        return KeptElsewhere(moved, geometry_of(tensor), tensor, value)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of the tensor's storage, whose size is a multiple of the item's, without copying."""
    num_items = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.detach().as_strided((num_items,), (1,), 0).view(torch.uint8)


class MovedStorage:
    """A storage that was moved; its bytes are freed when it has no reader left.

    Args:
        flat: its bytes, which are moved now.
        before: the one that was moved before it: backward needs that one next.
        group: number of its group; see `_prefetch`.

    Attributes:
        waiting: its readers; once back, it stays on the device until the last of them has been served.
    """

    __slots__ = ("__weakref__", "_before", "_group", "_handle", "_moves", "_nbytes", "_transport", "waiting")

    def __init__(
        self, flat: torch.Tensor, transport: Transport, moves: Moves, before: MovedStorage | None, group: int
    ) -> None:
        self._group = group
        self.waiting = Waiting()
        self._transport = transport
        self._moves = moves
        self._handle = transport.put(flat)
        self._nbytes = flat.numel()
        self._before = weakref.ref(before) if before is not None else None
        moves.bytes_out += self._nbytes
        moves.num_blocks += 1

    def load(self) -> torch.Tensor:
        """Returns the storage's bytes on the device, and prefetches its group and the one before."""
        flat = self.waiting.result()
        if flat is None:
            flat = self._transport.get(self._handle)
            self._moves.bytes_back += self._nbytes
        self.waiting.hold(flat)
        self._prefetch()
        return flat  # type: ignore[no-any-return]

    def _prefetch(self) -> None:
        groups = {self._group}
        block = self._before() if self._before is not None else None
        while block is not None and (len(groups) < 2 or block._group in groups):
            groups.add(block._group)
            if block.waiting and block.waiting.result() is None:
                self._transport.prefetch(block._handle)
            block = block._before() if block._before is not None else None


class KeptElsewhere:
    """Contents of a storage on the host: a private copy, which writes to the storage do not change.

    Args:
        block: where the contents are.
        geometry: how the saved tensor lies in them.
        original: the saved tensor.
        value: its record of lineage, if there is one.
    """

    __slots__ = ("__weakref__", "_geometry", "_original", "_value", "_version", "block")

    def __init__(
        self, block: MovedStorage, geometry: Geometry, original: torch.Tensor, value: Value | None = None
    ) -> None:
        self.block = block
        self._value = weakref.ref(value) if value is not None else None
        self._geometry = geometry
        self._original = weakref.ref(original)
        self._version = original._version

    def contents(self) -> torch.Tensor:
        """Returns the tensor as it was saved, on the device."""
        size, stride, offset, dtype = self._geometry
        return self.block.load().view(dtype).as_strided(size, stride, offset)

    def check(self) -> None:
        """Raises if the tensor was changed in place since it was saved, as autograd does."""
        value, original = self._value() if self._value is not None else None, self._original()
        size, _, _, dtype = self._geometry
        if (value is not None and value.overwritten) or (original is not None and original._version != self._version):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{dtype} {list(size)}] was changed since it was saved and offloaded; clone it before changing it."
            )

    def rescue(self) -> None:
        """Does nothing: the copy is private, nobody can write to it."""

    def is_rescued(self, written: Geometry) -> bool:
        """Always True: the copy is private."""
        return True

    def is_current(self) -> bool:
        """Always True: the copy is private."""
        return True


class Returning:
    """Handle that autograd holds in place of a saved tensor over a moved storage."""

    __slots__ = ("__weakref__", "_geometry", "_kept", "_ticket")

    def __init__(self, kept: KeptElsewhere, geometry: Geometry) -> None:
        self._kept = kept
        self._geometry = geometry
        self._ticket = kept.block.waiting.add(self)

    def unpack(self) -> torch.Tensor:
        """Returns the tensor; raises if it was changed in place since it was saved."""
        self._kept.check()
        with execution_context.recomputing():
            tensor = self._kept.contents()
            self._kept.block.waiting.serve(self._ticket)
            if geometry_of(tensor) == self._geometry:
                return tensor
            size, stride, offset, dtype = self._geometry
            return tensor.view(dtype).as_strided(size, stride, offset)
