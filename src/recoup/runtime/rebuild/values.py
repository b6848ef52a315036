"""What a record of a step is made of: contents of storages, and the ops that made them ([Note: lineage])."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from recoup.runtime.rebuild.constant import Constant
from recoup.runtime.waiting import Waiting

Geometry = tuple[Any, Any, Any, torch.dtype]  # size, stride, storage offset, dtype
PLAIN = frozenset([int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format])


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Returns how the tensor lies over its storage."""
    return tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype


def share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie over one storage; sparse ones never do."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


class Value:
    """The contents of one storage at one moment.

    Attributes:
        made: how a cheap op made it, None if something else did. output: which of that op's results it is.
        base: geometry of the tensor that fills the storage, None while unknown.
        kept: the `Kept` that holds these contents now, if any (weak).
        constant: a parameter that holds these contents, if one does.
        random_mask: these are zeros and ones drawn by `bernoulli_`.
        is_passing: the storage is written to again, unseen, by the call that made them or by the next forward: nothing
            is rebuilt from them but what was copied before.
        stays: what autograd saves of them stays, and nothing is rebuilt from it.
        waiting: the rederived tensors of this value that will still be asked for, by the turn at which they were
            saved; holds the contents once they were rebuilt for another, if they are wanted soon.
        overwritten: parts of the storage that hold something else by now: what autograd saved of them before may not
            be used.
    """

    # Most stay as they are: one is made for each op, and setting them all took longer than the op's record.
    made: Made | None = None
    output = 0
    base: Geometry | None = None
    kept: weakref.ref[Any] | None = None
    constant: Constant | None = None
    random_mask = False
    is_passing = False
    stays = False
    overwritten: tuple[Geometry, ...] = ()
    waiting: Waiting | None = None

    def num_bytes(self) -> int:
        """Returns the bytes of what fills the storage, 0 while that is unknown."""
        return 0 if self.base is None else int(self.base[0].numel() * self.base[3].itemsize)

    def rebuilt(self) -> torch.Tensor | None:
        """Returns the contents if they were rebuilt and are held for somebody else."""
        return None if self.waiting is None else self.waiting.result()

    def alive(self) -> Any | None:
        """Returns the object that keeps these contents now; None if there is none or it was overwritten."""
        kept = self.kept() if self.kept is not None else None
        return kept if kept is not None and kept.is_current() else None

    def without_history(self) -> Value:
        """Returns a value of the same geometry, for other steps."""
        found = Value()
        found.base, found.is_passing = self.base, self.is_passing
        return found


class Read:
    """A tensor argument: a value and the geometry it was read with."""

    __slots__ = ("geometry", "value")

    def __init__(self, value: Value, geometry: Geometry) -> None:
        self.value = value
        self.geometry = geometry


class Made:
    """One cheap op: what to call again, on what.

    `args` and `kwargs` are the op's own with tensors replaced by `Read`s. `written`: geometries of what it writes.
    `outputs`: the values of all its results, where there are several. `side_results`: what keeps all but the first of
    them, if that helps to rebuild the first (`shortcuts.py`). `is_flat`: reads are among `args` themselves, none in a
    list or in `kwargs`. `order`: how many ops were recorded before it, `traffic_bytes`: that it reads and writes.
    """

    outputs: tuple[weakref.ref[Value], ...] = ()
    side_results: tuple[weakref.ref[Any], ...] = ()
    values: tuple[Value, ...] = ()  # those of `reads`, in a plan by tensor
    _traffic_bytes = -1

    def __init__(self, function: Any, args: Any, kwargs: Any, reads: list[Read], is_flat: bool, order: int) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.reads = reads
        self.is_flat = is_flat
        self.order = order
        self.written: list[Geometry] = []

    @property
    def traffic_bytes(self) -> int:
        """Once it has returned."""
        if self._traffic_bytes < 0:
            laid = [read.geometry for read in self.reads] + self.written
            self._traffic_bytes = sum(size.numel() * dtype.itemsize for size, _, _, dtype in laid)
        return self._traffic_bytes
