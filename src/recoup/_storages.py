"""Which memory tensors lie in: their dense parts, and the bytes of their storages that they cover.

A batch is often a slice of a data set. What a step holds of it is the slice, not the data set behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from recoup import _torch

Range = tuple[int, int]


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the strided tensors that a tensor consists of: itself, the indices and values of a sparse one, the local
    part of a distributed one."""
    if _torch.is_wrapper_type(type(tensor)):
        return [part for inner in _torch.parts_of_wrapper(tensor) for part in dense_parts(inner)]
    if tensor.layout is torch.strided:
        return [tensor] if _torch.has_storage(tensor) else []
    return _torch.sparse_parts(tensor)


def covered_range(tensor: torch.Tensor) -> Range:
    """Returns the first byte of its storage that a strided tensor shows, and the one after the last."""
    size = tensor.dtype.itemsize
    begin = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        return begin, begin
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (int(last) + 1) * size


def storage_key(tensor: torch.Tensor) -> int:
    """Returns a number that strided tensors in the same memory share."""
    storage = tensor.untyped_storage()
    return storage._cdata if tensor.device.type == "meta" else storage.data_ptr() or storage._cdata


def covered_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns how many bytes the tensors cover, each byte counted once."""
    return sum(end - begin for begin, end, _ in _clusters(part for t in tensors for part in dense_parts(t)))


def sharing_memory(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns strided tensors in groups, those that cover the same bytes together."""
    return [group for _, _, group in _clusters(tensors)]


def _clusters(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
    by_storage: dict[int, list[tuple[Range, torch.Tensor]]] = {}
    for tensor in {id(t): t for t in tensors}.values():
        by_storage.setdefault(storage_key(tensor), []).append((covered_range(tensor), tensor))
    for found in by_storage.values():
        found.sort(key=lambda item: item[0])
        (first, last), group = found[0][0], [found[0][1]]
        for (begin, end), tensor in found[1:]:
            if begin < last:
                last = max(last, end)
                group.append(tensor)
            else:
                yield first, last, group
                (first, last), group = (begin, end), [tensor]
        yield first, last, group
