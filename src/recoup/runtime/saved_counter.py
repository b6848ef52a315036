"""Counts what a forward keeps for its backward, for the watch of training steps (`step_watch.py`)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from recoup.runtime.rebuild.kept import Simple, kept_simply


def precision_of(module: nn.Module) -> str:
    """Returns the dtype that a module with floating weights of its own computes in now; "" for any other."""
    weight = next((p for p in module.parameters(recurse=False) if p.is_floating_point()), None)
    if weight is None:
        return ""
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return str(dtype).removeprefix("torch.")


class SavedCounter:
    """Counts the storages that autograd and the engine keep in one forward, each once, while they are alive."""

    def __init__(self, others: Iterable[torch.Tensor]) -> None:
        self._others = {t.untyped_storage()._cdata for t in others if t.layout is torch.strided}
        self._kept: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.precisions: dict[str, None] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes of the storages that are alive."""
        return sum(storage.nbytes() for kept in self._kept.values() if (storage := kept()) is not None)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage is one of those."""
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._kept

    def saved(self, tensor: torch.Tensor) -> None:
        """A tensor is kept, perhaps for a while only: a plan by tensor frees some at the end of their segment."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._others:
                self._kept[storage._cdata] = weakref.ref(storage)

    def rederived(self, tensor: torch.Tensor, sources: list[torch.Tensor]) -> None:
        """A tensor is not kept."""

    def pack(self, tensor: torch.Tensor) -> Simple:
        """Saved-tensor hook for tensors that autograd keeps."""
        self.saved(tensor)
        return kept_simply(tensor)

    def note_precision(self, module: nn.Module, args: Any) -> None:
        """Pre-forward hook of every module: notes the dtype in which modules with floating weights compute."""
        precision = precision_of(module)
        if precision:
            self.precisions[precision] = None
