"""Saved tensors that are kept: as they are, as a view of one that is kept, or in a smaller dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from recoup import _torch
from recoup.runtime import execution_context
from recoup.runtime.offload.offloaded_saved_tensor import KeptElsewhere
from recoup.runtime.rebuild.values import Geometry, Value, geometry_of

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "[{tensor}] is {versions}. It was saved, or is what a saved tensor is rederived from; clone it before changing it."
)


def changed_since(what: str) -> RuntimeError:
    """Returns autograd's error for a tensor that was changed in place and cannot be rebuilt from any more."""
    return RuntimeError(CHANGED.format(tensor=what, versions="overwritten since"))


def is_overwritten(value: Value, geometry: Geometry) -> bool:
    """Whether a part of a storage was written to since it had these contents.

    Autograd's version counter is the whole storage's, but for the results of `unsafe_chunk` and `unsafe_split`, which
    share memory and no counter: a GRU cell writes over one gate after another's result was saved.
    """
    return any(overlap(written, geometry) for written in value.overwritten)


def overlap(a: Geometry, b: Geometry) -> bool:
    """Whether two tensors over one storage have an element in common; True where their dtypes differ."""
    if a == b or a[3] != b[3]:
        return True
    if 0 in a[0] or 0 in b[0]:
        return False
    last = [
        offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) for size, stride, offset, _ in (a, b)
    ]
    if last[0] < b[2] or last[1] < a[2]:
        return False
    seen = np.zeros(max(last) + 1, dtype=bool)
    _elements(seen, a)[...] = True
    return bool(_elements(seen, b).any())


def _elements(storage: np.ndarray, geometry: Geometry) -> np.ndarray:
    size, stride, offset, _ = geometry
    return np.lib.stride_tricks.as_strided(storage[offset:], tuple(size), tuple(stride))  # a bool takes one byte


class Kept:
    """A tensor that is kept as it is.

    Attributes:
        is_saved: whether autograd has it; else others are rebuilt from it alone.
        views: geometries of what autograd has of the storage besides.
    """

    __slots__ = ("__weakref__", "copy", "is_saved", "is_source", "tensor", "version", "views")

    def __init__(self, tensor: torch.Tensor, *, is_saved: bool = True) -> None:
        # With its node it would be a cycle: a saved output is held by the node that made it.
        self.tensor = tensor if tensor.is_leaf else _torch.detach_past_modes(tensor)
        self.version = tensor._version
        self.is_saved = is_saved
        self.is_source = False
        self.views: tuple[Geometry, ...] = ()
        self.copy: torch.Tensor | None = None
        execution_context.kept(tensor)

    def unpack(self) -> torch.Tensor:
        """Returns the tensor; raises if it was changed in place since it was saved, as autograd would."""
        if self.tensor._version != self.version:
            check_version(self.tensor, self.version)
        return self.tensor

    def contents(self) -> torch.Tensor:
        """Returns the contents as they were saved, to rebuild others from."""
        return self.unpack() if self.copy is None else self.copy

    def rescue(self) -> None:
        """Called before the storage is overwritten: copies it if a saved tensor will be rebuilt from it."""
        if self.is_source and self.copy is None:
            size, stride, offset, _ = geometry_of(self.tensor)
            num_elements = self.tensor.untyped_storage().nbytes() // self.tensor.element_size()
            whole = self.tensor.detach().as_strided((num_elements,), (1,), 0)  # `set_` is refused by fake tensors
            self.copy = whole.clone().as_strided(size, stride, offset)

    def part(self) -> None:
        """Called where a call is to write to the storage, unseen: has a copy of its own, if anything starts from it.

        No call writes over what autograd saved in it, so that autograd, too, gets the copy.
        """
        self.rescue()
        if self.copy is not None:
            self.tensor, self.version = self.copy, self.copy._version

    def saved_as(self, geometry: Geometry) -> Kept | KeptView:
        """Returns what autograd gets for a tensor over the same storage."""
        if geometry_of(self.tensor) == geometry:
            self.is_saved = True
            return self
        self.views += (geometry,)
        return KeptView(self, geometry)

    def is_rescued(self, written: Geometry) -> bool:
        """Called once a part of the storage was overwritten: whether a copy has the contents.

        The storage is let go then, unless autograd has what was written over: that is to raise.
        """
        if self.copy is None:
            return False
        saved = (*self.views, geometry_of(self.tensor)) if self.is_saved else self.views
        if not any(overlap(written, geometry) for geometry in saved):
            self.tensor, self.version = self.copy, self.copy._version
        return True

    def is_current(self) -> bool:
        """Whether its contents are still those that were saved."""
        return self.copy is not None or self.tensor._version == self.version


class KeptConstant:
    """A parameter or a view of one that autograd saves. Chains know parameters, so that none starts from it."""

    __slots__ = ("__weakref__", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # with its node, of which the one that saves it is no part
        self._version = tensor._version
        execution_context.kept(tensor)

    def unpack(self) -> torch.Tensor:
        """Returns the tensor; raises if it was changed in place since it was saved, as autograd would."""
        if self._tensor._version != self._version:
            check_version(self._tensor, self._version)
        return self._tensor


Simple = tuple[torch.Tensor, int]  # a saved tensor that nobody asks for but the node that saves it, its version then


def kept_simply(tensor: torch.Tensor) -> Simple:
    """Returns what autograd gets where a program knows that nobody else asks, in less time than a `Kept` takes."""
    return tensor if tensor.is_leaf else _torch.detach_past_modes(tensor), tensor._version


def kept_with_its_node(tensor: torch.Tensor) -> Simple:
    """As `kept_simply`, of a tensor that is not made by the node that saves it: a parameter, or a view of one."""
    return tensor, tensor._version


def unpacked(packed: Any) -> torch.Tensor:
    """Returns a saved tensor; raises if it was changed in place since it was saved, as autograd would."""
    if type(packed) is tuple:
        tensor, version = packed
        if tensor._version != version:
            check_version(tensor, version)
        return tensor  # type: ignore[no-any-return]
    return packed.unpack()  # type: ignore[no-any-return]


class KeptView:
    """A saved tensor that lies over the same storage as one that is kept."""

    __slots__ = ("__weakref__", "geometry", "kept")

    def __init__(self, kept: Kept, geometry: Geometry) -> None:
        self.kept = kept
        self.geometry = geometry

    def unpack(self) -> torch.Tensor:
        """Returns the tensor; raises if it was changed in place since it was saved."""
        return laid(self.kept.unpack(), self.geometry)


class KeptCompact:
    """A tensor whose values fit a smaller dtype: a random mask of zeros and ones, the indices of a max-pooling."""

    __slots__ = ("__weakref__", "base", "is_source", "narrow")

    def __init__(self, narrow: torch.Tensor, base: Geometry) -> None:
        self.narrow = narrow
        self.base = base
        self.is_source = True
        execution_context.kept(narrow)

    def contents(self) -> torch.Tensor:
        """Returns it in its own dtype and layout."""
        size, stride, _, dtype = self.base
        wide = torch.empty_strided(size, stride, dtype=dtype, device=self.narrow.device)
        narrow = self.narrow
        return wide.copy_(narrow.view(torch.uint8) if narrow.dtype == torch.bool else narrow)  # a vectorized copy

    def rescue(self) -> None:
        """Nothing to do: nobody else can write to it."""

    def is_rescued(self, written: Geometry) -> bool:
        """Always."""
        return True

    def is_current(self) -> bool:
        """Always: nobody else holds it."""
        return True


Source = Kept | KeptCompact | KeptElsewhere


def check_version(tensor: torch.Tensor, version: int) -> None:
    """Raises autograd's error if the tensor was changed in place since it was at `version`."""
    if tensor._version != version:
        versions = f"at version {tensor._version}; expected version {version}"
        raise RuntimeError(CHANGED.format(tensor=f"{tensor.dtype} {list(tensor.shape)}", versions=versions))


def laid(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Returns the storage of `tensor` seen with another geometry."""
    size, stride, offset, dtype = geometry
    if tensor.dtype != dtype:  # the same bytes read otherwise (`view_as_real`): the whole storage, however it lies
        unit = max(tensor.dtype.itemsize, dtype.itemsize)
        num = tensor.untyped_storage().nbytes() // unit * unit // tensor.dtype.itemsize
        tensor = tensor.as_strided((num,), (1,), 0).view(dtype)
    if tensor.size() == size and tensor.stride() == stride and tensor.storage_offset() == offset:
        return tensor
    return tensor.as_strided(size, stride, offset)


def on_device(source: Source) -> torch.Tensor | None:
    """Returns the tensor that a source keeps on the device, None if it was moved away."""
    if isinstance(source, KeptElsewhere):
        return None
    return source.narrow if isinstance(source, KeptCompact) else source.tensor
