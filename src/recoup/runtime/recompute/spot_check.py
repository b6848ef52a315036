"""A few bytes of a tensor, by which two runs of a forward are compared at a cost that does not grow with the tensor."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recoup import _torch

_SAMPLED = frozenset(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool]
)
_SAMPLE_BYTES = 64  # at the start, the middle and the end of a tensor
_part_at = (ctypes.c_char * _SAMPLE_BYTES).from_address  # a third of what `string_at` takes


def sample(tensor: torch.Tensor) -> bytes:
    """Returns bytes of a tensor, read from its memory without any op.

    None on a device, which would wait; none of weights and views of weights, which are known by what they are.
    """
    if type(tensor) is nn.Parameter or type(tensor._base) is nn.Parameter:
        return b""
    return read_bytes(tensor)


def matches(sampled: bytes, tensor: torch.Tensor) -> bool:
    """Whether the tensor has the values of a sample, floats up to what a different order of summation does."""
    found = sample(tensor)
    if found == sampled or not found or not sampled or len(found) != len(sampled):
        return True
    if not tensor.is_floating_point():
        return False
    with _torch.without_dispatch_modes(), torch.no_grad():
        a, b = (torch.frombuffer(bytearray(x), dtype=tensor.dtype).double() for x in (sampled, found))
        size = float(torch.maximum(a.abs(), b.abs()).nan_to_num(0.0, 0.0, 0.0).max())
        return torch.allclose(a, b, rtol=0.0, atol=size * torch.finfo(tensor.dtype).eps ** 0.5, equal_nan=True)


def read_bytes(tensor: torch.Tensor) -> bytes:
    """Returns bytes from the start, the middle and the end; none of what is not plain host memory."""
    kind = type(tensor)
    if (kind is not nn.Parameter and kind is not torch.Tensor) or not tensor.is_cpu:
        return b""
    if tensor.dtype not in _SAMPLED or tensor.layout is not torch.strided:
        return b""
    try:
        start, size = tensor.data_ptr(), tensor.nbytes
    except RuntimeError:  # inside `torch.func` transforms: no memory of its own
        return b""
    if not start or not size or not tensor.untyped_storage().nbytes():  # FSDP takes a unit's memory away
        return b""
    if tensor.is_contiguous():
        if kind is nn.Parameter:  # step after step at the same place
            return b"".join([part.raw for part in _parts(start, size)])
        if size <= 3 * _SAMPLE_BYTES:
            return ctypes.string_at(start, size)
        middle = start + size // 16 * 8
        end = start + size - _SAMPLE_BYTES
        return _part_at(start).raw + _part_at(middle).raw + _part_at(end).raw  # type: ignore[no-any-return]
    width = tensor.element_size()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) * width
    return ctypes.string_at(start, width) + ctypes.string_at(start + last, width)


class Samples:
    """Reads sampled bytes of some parameters, fast as long as these lie where they lay: no question is asked twice.

    It outlives a step and holds none of them. The windows are looked through only while each tensor is the one they
    were made for, as many bytes at the same address: memory that was taken away (FSDP) is at no address.
    """

    __slots__ = ("_at", "_known", "_parts")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._known = [weakref.ref(t) for t in tensors]
        self._at: list[tuple[int, int]] = []
        self._parts: list[tuple[Any, ...]] = []
        if all(type(t) is nn.Parameter and read_bytes(t) and t.is_contiguous() for t in tensors):
            self._at = _places(tensors)
            self._parts = [_parts(start, size) for start, size in self._at]

    def are_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters it was made for, and lie where they lay."""
        is_same = len(tensors) == len(self._known) and all([ref() is t for ref, t in zip(self._known, tensors)])
        return is_same and (not self._at or _places(tensors) == self._at)

    def read(self, tensors: Sequence[torch.Tensor]) -> list[bytes]:
        """Returns what `read_bytes` returns for each."""
        if self._at and _places(tensors) == self._at:
            return [b"".join([part.raw for part in parts]) for parts in self._parts]
        return list(map(read_bytes, tensors))


def _places(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(t.data_ptr(), t.nbytes) for t in tensors]


@functools.lru_cache(maxsize=4096)
def _parts(start: int, size: int) -> tuple[Any, ...]:
    """Returns windows on the sampled bytes of `size` bytes of memory."""
    if size <= 3 * _SAMPLE_BYTES:
        return ((ctypes.c_char * size).from_address(start),)
    return tuple([_part_at(at) for at in (start, start + size // 16 * 8, start + size - _SAMPLE_BYTES)])
