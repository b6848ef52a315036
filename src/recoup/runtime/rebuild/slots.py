"""Slots: numbers of the tensors that a step's calls were handed and have returned, while the step is noted."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from recoup.runtime.rebuild.values import share_storage


class Slots:
    """Knows tensors by what they are, and by the memory they lie over; it holds none.

    Attributes:
        num: of slots so far.
    """

    def __init__(self) -> None:
        self.num = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._storages: dict[weakref.ref[Any], int] = {}  # of tensors met that live; a slot over each

    def of(self, tensor: Any) -> int | None:
        """Returns the slot of a tensor, None if it has none."""
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def over(self, tensor: torch.Tensor) -> int:
        """Returns the slot of a tensor over the same storage, -1 if there is none."""
        return self._storages.get(weakref.ref(tensor.untyped_storage()), -1)

    def give(self, tensor: Any) -> int:
        """Gives a tensor the next slot."""
        slot = self.num
        self.num = slot + 1
        self._known[id(tensor)] = weakref.ref(tensor), slot
        return slot

    def meet(self, tensors: Sequence[Any]) -> None:
        """Notes which memory these lie over."""
        gone = self._storages.pop
        for tensor in tensors:
            if tensor.layout is torch.strided:
                slot = self.of(tensor)
                self._storages[weakref.ref(tensor.untyped_storage(), gone)] = -1 if slot is None else slot

    def has_met(self, tensor: Any) -> bool:
        """Whether a tensor lies over memory that was met before, or over none of its own."""
        return tensor.layout is not torch.strided or weakref.ref(tensor.untyped_storage()) in self._storages


def memory_of(tensor: torch.Tensor, pool: Sequence[torch.Tensor]) -> int | None:
    """Returns the place of the first tensor over the same storage, None if it lies over one of its own.

    Args:
        pool: what a call was handed, and its results, of which it is one.
    """
    places = [i for i, other in enumerate(pool if type(tensor) is torch.Tensor else ()) if share_storage(other, tensor)]
    return None if not places or (len(places) == 1 and pool[places[0]] is tensor) else places[0]
