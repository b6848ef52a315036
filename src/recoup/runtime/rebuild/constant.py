"""Parameters that saved tensors are rebuilt from."""

from __future__ import annotations

import torch

from recoup.runtime.recompute.spot_check import read_bytes


class Constant:
    """A parameter (or the flat one that FSDP1's weights are views of), whose contents backward finds unless changed.

    Attributes:
        version, storage, sample: when it was read: version counter, storage, and a few of its bytes.
        is_source: whether a saved tensor will be rebuilt from it.
        copy: its contents at that time, if the forward has written to it since.
    """

    __slots__ = ("copy", "is_source", "sample", "storage", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.is_source = False
        self.copy: torch.Tensor | None = None
        self.version = tensor._version
        self.sample = read_bytes(tensor)
        self.storage = tensor.untyped_storage()._cdata

    def rescue(self) -> None:
        """Called before it is overwritten: copies it if something is to be rebuilt from it."""
        if self.is_source and self.copy is None:
            self.copy = self.tensor.detach().clone()
