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
from typing import Any, NamedTuple

import torch
from torch import nn

from recoup import _torch
from recoup.runtime.offload.offloaded_saved_tensor import (
    MIN_BYTES,
    KeptElsewhere,
    MovedStorage,
    Moves,
    Returning,
    flat_bytes,
)
from recoup.runtime.offload.transport import Transport, make_transport
from recoup.runtime.rebuild.kept import kept_simply, unpacked
from recoup.runtime.rebuild.values import geometry_of

_WHOLE_SHARE = 0.5  # of a storage that a tensor must cover to have it moved whole: `unsafe_chunk`'s parts change unseen


class Offloader(Moves):
    """Moves what autograd saves in a block of `offload`; totals of what was moved."""

    def __init__(self, model: nn.Module, transport: Transport, *, min_bytes: int, keep_last: int) -> None:
        super().__init__()
        self._transport = transport
        self._min_bytes = min_bytes
        self._stays = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self._known: dict[int, tuple[weakref.ref[Any], int, weakref.ref[MovedStorage]]] = {}
        self._last: weakref.ref[MovedStorage] | None = None
        self._keep_last = keep_last
        self._on_device: deque[MovedStorage] = deque()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Saved-tensor hook: returns a handle on the moved tensor, or the tensor and its version if it stays."""
        own_bytes = tensor.numel() * tensor.dtype.itemsize
        if tensor.layout is not torch.strided or own_bytes < self._min_bytes:
            return kept_simply(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata in self._stays or storage.nbytes() % tensor.dtype.itemsize:
            return kept_simply(tensor)
        if own_bytes < _WHOLE_SHARE * storage.nbytes():
            dense = tensor.detach().clone(memory_format=torch.contiguous_format)
            return _Slice(self._returning(self._move(dense), dense, tensor), tensor.stride())
        known = self._known.get(storage._cdata)
        moved = known[2]() if known and known[0]() is storage and known[1] == tensor._version else None
        if moved is not None:
            return self._returning(moved, tensor, tensor)
        moved = self._move(tensor)
        self._known[storage._cdata] = (weakref.ref(storage), tensor._version, weakref.ref(moved))
        return self._returning(moved, tensor, tensor)

    def _move(self, tensor: torch.Tensor) -> MovedStorage:
        before = self._last() if self._last is not None else None
        moved = MovedStorage(flat_bytes(tensor), self._transport, self, before, self.num_blocks)
        self._last = weakref.ref(moved)
        return moved

    def _returning(self, moved: MovedStorage, held: torch.Tensor, original: torch.Tensor) -> Returning:
        geometry, is_first = geometry_of(held), not moved.waiting
        returning = Returning(KeptElsewhere(moved, geometry, original), geometry)
        if self._keep_last and is_first:
            moved.waiting.hold(flat_bytes(held))
            self._on_device.append(moved)
            if len(self._on_device) > self._keep_last:
                self._on_device.popleft().waiting.let_go()
        return returning


class _Slice(NamedTuple):
    """A small part of a storage, moved as a tensor of its own."""

    returning: Returning
    stride: tuple[int, ...]

    def unpack(self) -> torch.Tensor:
        """Returns the tensor with the strides that it had."""
        dense = self.returning.unpack()
        if dense.stride() == self.stride:
            return dense
        return torch.empty_strided(dense.size(), self.stride, dtype=dense.dtype, device=dense.device).copy_(dense)


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
    with _torch.saved_tensors_hooks(moved.pack, unpacked):
        yield moved
