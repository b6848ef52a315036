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

_SAMPLED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool]
_element_at = {dtype: (ctypes.c_char * dtype.itemsize).from_address for dtype in _SAMPLED}
_SAMPLE_BYTES = 64  # at the start, the middle and the end of a tensor
_sample_at = (ctypes.c_char * _SAMPLE_BYTES).from_address  # takes a third of what `ctypes.string_at` takes
_START = slice(0, _SAMPLE_BYTES)


Kind = tuple[torch.Size, torch.dtype, tuple[Any, ...] | None]
"""What tells a saved tensor besides its values: shape, dtype, the weight that it lies in."""


def matches(sampled: bytes, found: bytes, dtype: torch.dtype) -> bool:
    """Whether two samples of tensors of one dtype are equal, floats up to what a different order of summation does."""
    if found == sampled or not found or not sampled or len(found) != len(sampled):
        return True
    if not dtype.is_floating_point:
        return False
    with _torch.without_dispatch_modes(), torch.no_grad():
        a, b = (torch.frombuffer(bytearray(x), dtype=dtype).double() for x in (sampled, found))
        size = float(torch.maximum(a.abs(), b.abs()).nan_to_num(0.0, 0.0, 0.0).max())
        return torch.allclose(a, b, rtol=0.0, atol=size * torch.finfo(dtype).eps ** 0.5, equal_nan=True)


def read_bytes(tensor: torch.Tensor) -> bytes:
    """Returns bytes from the start, the middle and the end, read from memory without any op.

    None of what is not plain host memory: on a device, which would wait, or of a wrapper.
    """
    kind = type(tensor)
    element_at = _element_at.get(tensor.dtype)
    if (kind is not torch.Tensor and kind is not nn.Parameter) or element_at is None or not tensor.is_cpu:
        return b""
    try:
        start, size = tensor.data_ptr(), tensor.nbytes
        if not start or not size or not tensor.untyped_storage().nbytes():  # FSDP takes a unit's memory away
            return b""
    except RuntimeError:  # inside `torch.func` transforms, or sparse: no memory of its own
        return b""
    if tensor.is_contiguous():
        if size <= 3 * _SAMPLE_BYTES:
            return ctypes.string_at(start, size)
        middle, end = start + size // 16 * 8, start + size - _SAMPLE_BYTES
        return _sample_at(start).raw + _sample_at(middle).raw + _sample_at(end).raw  # type: ignore[no-any-return]
    last = start + tensor.itemsize * _last_element(tensor.shape, tensor.stride())
    return element_at(start).raw + element_at(last).raw  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=4096)
def _last_element(shape: torch.Size, stride: tuple[int, ...]) -> int:
    return sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


@functools.lru_cache(maxsize=4096)
def _window(size: int) -> tuple[Any, slice, slice]:
    """Returns what makes a view of `size` bytes at an address, and where in it are the middle and the end.

    A view of all the bytes and three slices of it take half of what three views take.
    """
    at = (ctypes.c_char * size).from_address
    if size <= 3 * _SAMPLE_BYTES:
        return at, slice(_SAMPLE_BYTES, 2 * _SAMPLE_BYTES), slice(2 * _SAMPLE_BYTES, size)
    middle = size // 16 * 8
    return at, slice(middle, middle + _SAMPLE_BYTES), slice(size - _SAMPLE_BYTES, size)


class Spots:
    """Where a few bytes of a parameter lie, looked up once: reading them takes a third of what `read_bytes` takes.

    Attributes:
        storage: that it lies over.
    """

    __slots__ = ("_address", "_end", "_memory", "_middle", "_num_bytes", "storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address, self._num_bytes = tensor.data_ptr(), tensor.nbytes
        self.storage = tensor.untyped_storage()._cdata
        at, self._middle, self._end = _window(self._num_bytes)
        self._memory = at(self._address)

    def look_at(self, tensor: torch.Tensor) -> bytes | None:
        """Returns what `read_bytes` returns; None if it lies elsewhere: memory that was taken away is at no address."""
        if tensor.data_ptr() != self._address or tensor.nbytes != self._num_bytes:
            return None
        memory = self._memory
        return memory[_START] + memory[self._middle] + memory[self._end]  # type: ignore[no-any-return]


def spots_of(tensor: torch.Tensor) -> Spots | None:
    """Returns where to look at a tensor's bytes; None if `read_bytes` has none of it or looks elsewhere."""
    return Spots(tensor) if type(tensor) is nn.Parameter and tensor.is_contiguous() and read_bytes(tensor) else None


def storage_of(tensor: torch.Tensor) -> int | None:
    """Returns an id of the tensor's storage; None if it has none of its own (sparse, wrapper subclasses)."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return _torch.storage_address(tensor)  # type: ignore[no-any-return]
    except (NotImplementedError, RuntimeError):
        return None


class Samples:
    """Reads where some parameters lie and sampled bytes of them, fast as long as they lie where they lay.

    It outlives a step and holds none of them. The windows are looked through only while each tensor has as many bytes
    at the same address as they were made for: memory that was taken away (FSDP) is at no address.
    """

    __slots__ = ("_known", "_places", "_windows")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._known = [weakref.ref(t) for t in tensors]
        self._look(tensors)

    def _look(self, tensors: Sequence[torch.Tensor]) -> None:
        self._places: list[int] | None = None  # None: they are read one by one
        self._windows: list[tuple[Any, slice, slice]] = []
        if all(type(t) is nn.Parameter and t.is_contiguous() and read_bytes(t) for t in tensors):
            for tensor in tensors:
                at, middle, end = _window(tensor.nbytes)
                self._windows.append((at(tensor.data_ptr()), middle, end))
            self._places = _places(tensors)

    def are_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters it was made for."""
        return len(tensors) == len(self._known) and all([ref() is t for ref, t in zip(self._known, tensors)])

    def storages(self, tensors: Sequence[torch.Tensor]) -> list[int | None]:
        """Returns what `storage_of` returns for each."""
        return list(map(storage_of if self._places is None else _torch.storage_address, tensors))

    def read(self, tensors: Sequence[torch.Tensor]) -> list[bytes]:
        """Returns what `read_bytes` returns for each."""
        if self._places is not None:
            if _places(tensors) == self._places:
                return [memory[_START] + memory[middle] + memory[end] for memory, middle, end in self._windows]
            self._look(tensors)
        return list(map(read_bytes, tensors))


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [t.data_ptr() for t in tensors] + [t.nbytes for t in tensors]
