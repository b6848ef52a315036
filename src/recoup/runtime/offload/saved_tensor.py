"""The action *offload*: saved tensors are moved off the device when saved and back before they are read.

Each storage is moved once, however many saved tensors lie over it; views are rebuilt from size, stride and dtype.
Tensors that share a storage with a parameter or buffer stay (`weight.t()` is no `Parameter`, but its storage is one's),
and so do small ones. Around a model with recomputed regions it moves the regions' inputs, since the regions' own hooks
lie inside.

The idea is that of `torch.autograd.graph.save_on_cpu` and torchtune's activation offloading. Unlike the first it moves
a storage once and no parameters; unlike the second it lets a graph be run backward twice.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.runtime.offload.offloaded_saved_tensor import MIN_BYTES
from recoup.runtime.offload.transport import Transport, make_transport

_WHOLE_SHARE = 0.5  # of a storage that a tensor must cover to have it moved whole: `unsafe_chunk`'s parts change unseen


class Offloader:
    """Totals of what a block of `offload` has moved.

    Attributes:
        bytes_out: bytes moved to the host so far.
        bytes_back: bytes moved back so far.
        num_blocks: number of storages moved out.
    """

    def __init__(self, model: nn.Module, transport: Transport, *, min_bytes: int, keep_last: int) -> None:
        self.bytes_out = 0
        self.bytes_back = 0
        self.num_blocks = 0
        self.transport = transport
        self._min_bytes = min_bytes
        self._stays = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self._known: dict[int, tuple[weakref.ref[Any], int, weakref.ref[_Block]]] = {}
        self._last: deque[_Block] = deque()
        self._keep_last = keep_last

    def pack(self, tensor: torch.Tensor) -> Any:
        """Saved-tensor hook: returns a handle on the moved tensor, or the tensor itself if it stays."""
        if tensor.layout is not torch.strided or tensor.numel() * tensor.dtype.itemsize < self._min_bytes:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self._stays:
            return tensor
        if tensor.numel() * tensor.dtype.itemsize < _WHOLE_SHARE * storage.nbytes():
            dense = tensor.detach().clone(memory_format=torch.contiguous_format)
            block = self._move(dense, dense.untyped_storage())
            return _Offloaded(block, tensor, compact=True)
        known = self._known.get(storage._cdata)
        found = known[2]() if known and known[0]() is storage and known[1] == tensor._version else None
        if found is None:
            found = self._move(tensor, storage)
            self._known[storage._cdata] = (weakref.ref(storage), tensor._version, weakref.ref(found))
        return _Offloaded(found, tensor, compact=False)

    def _move(self, tensor: torch.Tensor, storage: Any) -> _Block:
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
        block = _Block(self, self.transport.put(flat), flat.numel(), self._last[-1] if self._last else None)
        self.bytes_out += flat.numel()
        self.num_blocks += 1
        if self._keep_last:
            block.stashed = flat
            self._last.append(block)
            if len(self._last) > self._keep_last:
                self._last.popleft().stashed = None
        return block


class _Block:
    """A storage that was moved; its bytes are freed with the last saved tensor over it."""

    def __init__(self, owner: Offloader, handle: Any, nbytes: int, before: _Block | None) -> None:
        self.stashed: torch.Tensor | None = None
        self._owner = owner
        self._handle = handle
        self._nbytes = nbytes
        self._before = weakref.ref(before) if before is not None else None
        self._loaded: weakref.ref[Any] | None = None
        self._held: Any = None
        self.waiting = 0

    def load(self) -> Any:
        """Returns the storage on the device, where it stays until every tensor over it was read once."""
        if self.stashed is not None:
            return self.stashed.untyped_storage()
        storage = self._loaded() if self._loaded is not None else None
        if storage is None:
            storage = self._owner.transport.get(self._handle).untyped_storage()
            self._owner.bytes_back += self._nbytes
            self._loaded = weakref.ref(storage)
        self._held = storage if self.waiting else None
        before = self._before() if self._before is not None else None
        if before is not None and before.stashed is None and before._loaded is None:
            self._owner.transport.prefetch(before._handle)
        return storage


class _Offloaded:
    __slots__ = ("block", "compact", "dtype", "geometry", "original", "version", "waits")

    def __init__(self, block: _Block, tensor: torch.Tensor, *, compact: bool) -> None:
        self.block = block
        self.compact = compact
        self.dtype = tensor.dtype
        self.geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self.original = weakref.ref(tensor)
        self.version = tensor._version
        self.waits = True
        block.waiting += 1

    def unpack(self) -> torch.Tensor:
        """Returns the tensor as it was saved; raises if it was changed in place since, as autograd does."""
        original = self.original()
        size, stride, offset = self.geometry
        if original is not None and original._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.dtype} {list(size)}] is at version {original._version}; expected version {self.version} "
                "instead. It was saved and offloaded; clone it before changing it."
            )
        if self.waits:
            self.waits = False
            self.block.waiting -= 1
        storage = self.block.load()
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        if not self.compact:
            return tensor.set_(storage, offset, size, stride)
        dense: torch.Tensor = tensor.set_(storage, 0, size)  # type: ignore[call-overload]
        if dense.stride() == stride:
            return dense
        return torch.empty_strided(size, stride, dtype=self.dtype, device=storage.device).copy_(dense)


@contextlib.contextmanager
def offload(
    model: nn.Module, *, transport: Transport | str = "auto", min_bytes: int = MIN_BYTES, keep_last: int = 0
) -> Iterator[Offloader]:
    """Moves tensors that autograd saves inside the block to host memory; backward may run inside or after it.

    Gradients are bit-equal: bytes are moved, nothing is computed. The optimizer's state is not moved; see
    `recoup.offload_optimizer`.

    Args:
        model: the model, whose parameters and buffers are never moved.
        transport: "inline" (host memory, synchronous), "disk" (a file in the system's temporary directory), "cuda"
            (pinned memory, asynchronous), or your own `Transport`; "auto": "cuda" for a model on a GPU, otherwise
            "inline".
        min_bytes: smaller storages stay on the device.
        keep_last: number of storages moved last that also stay on the device, since backward reads them first.

    Raises:
        UsageError: if the transport is not known.

    Example:
        >>> model, x = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]), torch.randn(256, 64)
        >>> with recoup.offload(model, min_bytes=1024):
        ...     loss = model(x).mean()
        >>> loss.backward()
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    chosen = make_transport(device, transport, host="inline")
    moved = Offloader(model, chosen, min_bytes=min_bytes, keep_last=keep_last)
    with _torch.saved_tensors_hooks(moved.pack, lambda kept: kept.unpack() if isinstance(kept, _Offloaded) else kept):
        yield moved
