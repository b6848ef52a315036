"""Tensors that autograd saves while no call runs: a user's `autograd.Function` saves them when its forward is over.

Which tensor that is follows from no call. It lies over the memory of one that a call was handed or has returned, and a
step that follows a program looks whether it does: see `SavedBetween.is_it`.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from recoup.runtime.rebuild.values import Geometry, geometry_of, share_storage

if TYPE_CHECKING:
    from recoup.runtime.rebuild.step_program import ProgramCall


class SavedBetween:
    """One of them.

    Attributes:
        slot: of the tensor whose memory it lies over, -1 if there is none. is_last: whether nobody reads it later.
    """

    __slots__ = ("_geometry", "is_last", "slot")

    def __init__(self, slot: int, geometry: Geometry) -> None:
        self.slot = slot
        self.is_last = False
        self._geometry = geometry

    def is_it(self, tensor: torch.Tensor, slots: list[Any]) -> bool:
        """Whether a tensor is the one; lets go of the slot that nobody reads later."""
        held = slots[self.slot]
        if self.is_last:
            slots[self.slot] = None
        return held is not None and share_storage(held, tensor) and geometry_of(tensor) == self._geometry


class Between:
    """Those of a step, by their place among the tensors that autograd saves."""

    def __init__(self) -> None:
        self._found: dict[int, SavedBetween] = {}

    def note(self, at: int, tensor: torch.Tensor, slots: Iterable[tuple[weakref.ref[Any], int]]) -> None:
        """Notes one that a program has to know; `slots`: the tensors that have one."""
        near = [slot for ref, slot in slots if (held := ref()) is not None and share_storage(held, tensor)]
        self._found[at] = SavedBetween(near[-1] if near else -1, geometry_of(tensor))

    def drop_others(self, seen: Collection[int]) -> None:
        """Drops those that are not in places which are seen."""
        self._found = {at: one for at, one in self._found.items() if at in seen}

    def read_after(self, call: ProgramCall, read: set[int]) -> None:
        """Called for the calls of a program from the last to the first, with the slots that are read later."""
        for at in reversed(range(call.end_save, call.last_save)):
            one = self._found.get(at)
            if one is not None:
                one.is_last = one.slot not in read
                read.add(one.slot)

    def placed(self, calls: Sequence[ProgramCall]) -> dict[int, SavedBetween] | None:
        """Returns them, None if some lie over no memory that a call has given a slot before."""
        known: set[int] = set()
        found: dict[int, SavedBetween] = {}
        for call in calls if self._found else ():
            known.update(slot for _, slot in (*call.enters, *call.gives))
            known.update(view[1] for view in call.views)
            for at in range(call.end_save, call.last_save):
                if at in self._found and self._found[at].slot in known:
                    found[at] = self._found[at]
        return found if len(found) == len(self._found) else None
