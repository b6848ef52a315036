"""Parameters that saved tensors are rebuilt from."""

from __future__ import annotations

import torch

from recoup.runtime.recompute.spot_check import Spots, read_bytes


class Constant:
    """A parameter (or the flat one that FSDP1's weights are views of), whose contents backward finds unless changed.

    Attributes:
        version, storage, sample: when it was read: version counter, storage, and a few of its bytes.
        spots: where these lie, if that is known.
        is_source: whether a saved tensor will be rebuilt from it.
        copy: its contents at that time, if the forward has written to it since.

    Args:
        spots: of the tensor as it lies now. sample: what they show.
    """

    __slots__ = ("copy", "is_source", "sample", "spots", "storage", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, spots: Spots | None = None, sample: bytes | None = None) -> None:
        self.tensor = tensor
        self.is_source = False
        self.copy: torch.Tensor | None = None
        self.version = tensor._version
        self.spots = spots
        self.sample = read_bytes(tensor) if sample is None else sample
        self.storage = tensor.untyped_storage()._cdata if spots is None else spots.storage

    def is_as_read(self) -> bool:
        """Whether a glance shows it as it was; if not, it may be so all the same."""
        tensor, spots = self.tensor, self.spots
        if self.copy is not None or spots is None or tensor._version != self.version:
            return False
        return spots.look_at(tensor) == self.sample

    def rescue(self) -> None:
        """Called before it is overwritten: copies it if something is to be rebuilt from it."""
        if self.is_source and self.copy is None:
            self.copy = self.tensor.detach().clone()
