"""From a signature back to a call that can be run: the same op on tensors of the same shapes, strides and dtypes.

Values do not matter for time, with exceptions: NaN and denormal floats are slow, indices must be valid, and an index
that is always 0 finds its row in the cache. So floats are drawn in [0.5, 1], for ops that take probabilities alone (on
a GPU, other numbers end the process), integers are zeros (valid indices everywhere) but random rows for embeddings,
booleans are a coin toss.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack

from recoup.cost.caching_allocator import MIN_BLOCK_BYTES
from recoup.cost.flops import op_name
from recoup.ir.trace import Signature, TensorSpec
from recoup.thresholds import SMALL_BYTES

# What their opaque or resized arguments hold cannot be made up.
_REFUSED = frozenset({"_cudnn_rnn_backward", "miopen_rnn_backward", "resize", "set"})
# Position of the indices, and of what says how many rows there are.
_ROW_INDICES = {"embedding": (1, 0), "embedding_dense_backward": (1, 2)}
# Arguments that these kernels read on the host (attention.cu, `_efficient_attention_backward`), whatever fake tensors,
# which are all on one device, say of them.
_ON_HOST = {
    "_scaled_dot_product_efficient_attention_backward": ("philox_seed", "philox_offset"),
    "_efficient_attention_backward": ("philox_seed", "philox_offset"),
}


class Arena:
    """One block of memory that the floating-point arguments of ops are taken from, so its pages fault in once.

    Calls made with it are only good until it is cleared.

    Args:
        cache_bytes: a process's share of a CPU's last cache.
    """

    def __init__(self, device: torch.device, *, cache_bytes: int = 0) -> None:
        self.device = device
        self.cache_bytes = cache_bytes
        self._block = torch.empty(0, dtype=torch.uint8, device=device)
        self._used_bytes = 0
        self._pools: dict[torch.dtype, torch.Tensor] = {}
        self._flush = torch.empty(0, dtype=torch.uint8, device="cpu")

    def touch(self, nbytes: int) -> None:
        """Writes so many bytes that no op reads, the same ones each time: what was read before leaves the caches."""
        if self._flush.numel() < nbytes:
            self._flush = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._flush[:nbytes].fill_(1)

    @property
    def num_bytes(self) -> int:
        """Bytes of the block."""
        return self._block.numel()

    def clear(self, needed_bytes: int) -> None:
        """Takes all tensors back, and grows the block to `needed_bytes`."""
        self._used_bytes = 0
        if self._block.numel() < needed_bytes:
            self._block = torch.empty(0, dtype=torch.uint8, device=self.device)  # before the new one is there
            self._block = torch.empty(needed_bytes, dtype=torch.uint8, device=self.device)

    def floats(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns `count` numbers in [0.5, 1]."""
        num_bytes = aligned(count * dtype.itemsize)
        part = self._block[self._used_bytes : self._used_bytes + count * dtype.itemsize]
        # With a storage of its own: some ops copy an argument's whole one.
        flat = torch.utils.dlpack.from_dlpack(part).view(dtype)
        self._used_bytes += num_bytes
        pool = self._pools.get(dtype)
        if pool is None:
            # Drawing every number would take longer than the op.
            pool = (torch.rand(SMALL_BYTES // dtype.itemsize, device=self.device) / 2 + 0.5).to(dtype)
            self._pools[dtype] = pool
        whole, rest = divmod(count, len(pool))
        flat[: count - rest].view(whole, len(pool)).copy_(pool.expand(whole, len(pool)))
        flat[count - rest :].copy_(pool[:rest])
        return flat


def aligned(num_bytes: int) -> int:
    """Returns `num_bytes` rounded up to the arena's alignment."""
    return -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def extent(spec: TensorSpec) -> int:
    """Returns the elements of the smallest block a tensor fits in, gaps between its strides included."""
    if 0 in spec.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))


def extent_bytes(nest: Any) -> int:
    """Returns the bytes that all tensors of a nest take when each has a block of its own."""
    if isinstance(nest, TensorSpec):
        dtype = getattr(torch, nest.dtype, None)
        if len(nest.stride) != len(nest.shape) or not isinstance(dtype, torch.dtype):
            return 0
        return aligned(extent(nest) * dtype.itemsize)
    if isinstance(nest, (list, tuple)):
        return sum(extent_bytes(item) for item in nest)
    return 0


def argument_bytes(signature: Signature) -> int:
    """Returns the bytes that an op's arguments take when each has a block of its own."""
    return extent_bytes((signature.args, tuple(v for _, v in signature.kwargs)))


def make_call(signature: Signature, device: torch.device, arena: Arena | None = None) -> Callable[[], Any] | None:
    """Returns a function that runs the op on made-up data.

    Args:
        arena: where to lay out the floating arguments, with `argument_bytes` left; left out: a new one.

    Returns:
        A function without arguments that returns what the op returns; None for ops outside `aten` (who knows what
        they do to the world) and where an argument cannot be made again.
    """
    namespace, name, overload = [*signature.name.split("."), "default"][:3]
    short = op_name(signature.name)
    function = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
    if namespace != "aten" or short in _REFUSED or function is None:
        return None
    if arena is None:
        arena = Arena(device)
        arena.clear(argument_bytes(signature))
    try:
        args = [_decode(a, arena) for a in _with_host_scalars(short, function, signature.args)]
        kwargs = {k: _decode(v, arena) for k, v in signature.kwargs}
    except _CannotDecode:
        return None
    if short == "mkldnn_rnn_layer_backward":
        args[-1] = _lstm_workspace(args)
    if short in _ROW_INDICES:
        position, source = _ROW_INDICES[short]
        rows = args[source].shape[0] if isinstance(args[source], torch.Tensor) else args[source]
        args[position].random_(0, max(int(rows), 1))
    return lambda: function(*args, **kwargs)


def _with_host_scalars(short: str, function: Any, args: tuple[Any, ...]) -> list[Any]:
    names = _ON_HOST.get(short, ())
    return [
        dataclasses.replace(item, device="cpu") if argument.name in names and isinstance(item, TensorSpec) else item
        for argument, item in zip(function._schema.arguments, args, strict=False)
    ]


def _lstm_workspace(args: list[Any]) -> torch.Tensor:
    """Returns the workspace that oneDNN's LSTM backward needs, by running its forward: nothing else makes one.

    Its size is the kernel's own affair; fake tensors show it as empty.
    """
    tensors, (reverse, mode, hidden_size, num_layers, has_biases, is_training) = args[:7], args[13:19]
    is_bidirectional, batch_sizes, batch_first = args[19:22]
    with torch.enable_grad():  # without gradients it keeps nothing
        *_, workspace = torch.ops.aten.mkldnn_rnn_layer.default(
            *tensors, reverse, batch_sizes, mode, hidden_size, num_layers, has_biases, is_bidirectional, batch_first,
            is_training,
        )  # fmt: skip
    kept: torch.Tensor = workspace
    return kept


class _CannotDecode(Exception):
    pass


def _decode(item: Any, arena: Arena) -> Any:
    if isinstance(item, TensorSpec):
        return _tensor(item, arena)
    if isinstance(item, (list, tuple)):
        return [_decode(i, arena) for i in item]
    if isinstance(item, str) and ":" in item:
        kind, _, name = item.partition(":")
        if kind == "device":
            return arena.device
        if kind in ("dtype", "layout", "memory_format"):
            return getattr(torch, name)
        raise _CannotDecode
    return item


def _tensor(spec: TensorSpec, arena: Arena) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype, None)
    if len(spec.stride) != len(spec.shape) or not isinstance(dtype, torch.dtype):
        raise _CannotDecode
    count = extent(spec)
    device = torch.device(spec.device) if spec.device else arena.device
    if dtype.is_floating_point and dtype.itemsize >= 2:
        flat = arena.floats(count, dtype) if not spec.device else torch.ones(count, dtype=dtype, device=device)
    elif dtype == torch.bool:
        # Ones and zeros are what a mask's byte may hold; drawing bytes is quicker than drawing booleans.
        flat = torch.randint(0, 2, (min(count, SMALL_BYTES),), device=device, dtype=torch.uint8)
        flat = flat.repeat(math.ceil(count / max(flat.numel(), 1)))[:count].view(torch.bool)
    else:
        flat = torch.zeros(count, device=device, dtype=dtype)
    return flat.as_strided(spec.shape, spec.stride)
