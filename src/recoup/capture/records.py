"""Ops and storages while a step is recorded; they become those of `ir.trace`."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self

import torch

from recoup.ir.trace import Category, Phase
from recoup.thresholds import SMALL_BYTES

_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
_BEGINNINGS = tuple(f"{_OURS}/capture/{name}.py" for name in ("capture", "step", "folding/unfold"))


def user_line() -> str:
    """Returns "file:line" of the code of the step that runs now, "" where none does (backward, an optimizer).

    That is the innermost frame that is neither torch's nor ours; below the frame that began the step lies the caller of
    recoup, who made nothing. Installed packages are named from the package on, others by their last two folders.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        place = _place(frame.f_code.co_filename)
        if place is not None:
            return f"{place}:{frame.f_lineno}" if place else ""
        frame = frame.f_back
    return ""


@functools.lru_cache(maxsize=4096)
def _place(name: str) -> str | None:
    """Returns what a file is called; "" for one that begins the step, None for one that is torch's or ours."""
    if name in _BEGINNINGS:
        return ""
    if name.startswith((_TORCH, _OURS, "<")):
        return None
    _, installed, below = name.rpartition("site-packages/")
    return below if installed else "/".join(Path(name).parts[-3:]).removeprefix("//")


class Handle(weakref.ref):  # type: ignore[type-arg]
    """A storage that may die, and where its record is.

    Attributes:
        address, index: of the storage, and of its record. is_own: whether the record ends with it.
    """

    __slots__ = ("address", "index", "is_own")
    address: int
    index: int
    is_own: bool

    def __init__(self, storage: Any, died: Callable[[Handle], None], index: int, *, is_own: bool = True) -> None:
        super().__init__(storage, died)  # type: ignore[call-arg]
        self.address = storage._cdata
        self.index = index
        self.is_own = is_own

    def __new__(cls, storage: Any, died: Callable[[Handle], None], index: int, *, is_own: bool = True) -> Self:
        """Makes it as a weak reference is made."""
        return super().__new__(cls, storage, died)


class StorageRecord:
    """What becomes an `ir.trace.Storage`; `released_op` is filled in from a second run that saves nothing."""

    __slots__ = (
        "alloc_op",
        "category",
        "free_op",
        "label",
        "nbytes",
        "order",
        "released_op",
        "saved_by",
        "saved_ops",
        "source",
    )

    def __init__(self, nbytes: int, category: Category, alloc_op: int, order: int, label: str) -> None:
        self.nbytes = nbytes
        self.category: Category = category
        self.alloc_op = alloc_op
        self.order = order
        self.label = label
        self.free_op = -1
        self.released_op = -1
        self.saved_ops: list[int] = []
        self.saved_by: list[int] = []
        self.source = user_line() if alloc_op >= 0 and nbytes >= SMALL_BYTES else ""

    def moved(self, num_ops: int, order: int) -> StorageRecord:
        """Returns one like it that lives so many ops later."""
        made = StorageRecord(self.nbytes, self.category, -1, order, self.label)
        made.alloc_op, made.free_op, made.source = self.alloc_op + num_ops, self.free_op + num_ops, self.source
        return made

    def save(self, op: int, call: int) -> None:
        """Notes that autograd keeps it for `op` of `call`."""
        if self.category == "temporary":
            self.category = "saved"
        if not self.saved_ops or self.saved_ops[-1] != op:
            self.saved_ops.append(op)
        if not self.saved_by or self.saved_by[-1] != call:
            self.saved_by.append(call)


Sums = Literal["", "anew", "in place"]


class OpRecord:
    """An op while it is recorded; becomes an `ir.trace.Op`.

    Attributes:
        sums: what it is of autograd's own sums of gradients, see `sums.py`.
    """

    __slots__ = ("begins_call", "call", "inputs", "origin", "outputs", "phase", "replayed", "signature", "sums")

    def __init__(
        self,
        signature: int,
        call: int,
        origin: int,
        phase: Phase,
        replayed: bool,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        begins_call: bool,
        sums: Sums = "",
    ) -> None:
        self.sums: Sums = sums
        self.signature = signature
        self.begins_call = begins_call
        self.call = call
        self.origin = origin
        self.phase: Phase = phase
        self.replayed = replayed
        self.inputs = inputs
        self.outputs = outputs

    def like(self, call: int, origin: int, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> OpRecord:
        """Returns the same op of another call, on other storages."""
        where = call, origin, self.phase, self.replayed
        return OpRecord(self.signature, *where, inputs, outputs, self.begins_call, self.sums)
