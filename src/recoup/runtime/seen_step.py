"""What the watch of training steps (`step_watch.py`) keeps of one step."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Sight:
    """Sizes of a step, in bytes, as seen when its forward begins; `longest` is the largest dimension of its batch."""

    batch: int
    longest: int
    gradients: int
    state: int
    thawed: int
    precision: str

    def covers(self, other: Sight) -> bool:
        """Whether a step like `other` takes no more than one like this, as far as these sizes tell."""
        pairs = zip(dataclasses.astuple(self)[:-1], dataclasses.astuple(other)[:-1], strict=True)
        return self.precision == other.precision and all(own >= others for own, others in pairs)


def longest_dim(batch: Iterable[torch.Tensor]) -> int:
    """Returns the largest dimension of a batch's tensors; nested ones, which have no single size, are left out."""
    return max((max(t.shape, default=0) for t in batch if not t.is_nested), default=0)


class Graph:
    """Saved tensors of one forward; `alive` is freed with them.

    Attributes:
        saved_bytes: bytes that autograd keeps, estimated from those of the last forward that was counted if this one
            was not; 0 once a backward has freed them.
    """

    def __init__(self, saved_bytes: int) -> None:
        self.saved_bytes = saved_bytes
        self.alive: weakref.ref[Alive] | None = None


class Alive:
    """Object that a node of a graph holds, so that its end shows the graph's."""
