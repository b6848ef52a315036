"""Tensors that autograd saves apart from calls with a form: a user's `autograd.Function` saves them when its forward is
over, `torch.lstm` in a call of which a program knows nothing but what it is handed.

Which tensor that is follows from no call. It lies over the memory of one that a call was handed or has returned, and a
step that follows a program looks whether it does: see `SavedApart.is_it`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from recoup.runtime.rebuild.values import Geometry, geometry_of, share_storage

if TYPE_CHECKING:
    from recoup.runtime.rebuild.step_program import ProgramCall


class SavedApart:
    """One of them.

    Attributes:
        slot: of the tensor whose memory it lies over, -1 if there is none. is_last: whether nobody reads it later.
        geometry: its own.
    """

    __slots__ = ("geometry", "is_last", "slot")

    def __init__(self, slot: int, geometry: Geometry) -> None:
        self.slot = slot
        self.is_last = False
        self.geometry: Any = geometry

    def is_it(self, tensor: torch.Tensor, slots: list[Any]) -> bool:
        """Whether a tensor is the one; lets go of the slot that nobody reads later."""
        held = slots[self.slot]
        if self.is_last:
            slots[self.slot] = None
        return held is not None and share_storage(held, tensor) and geometry_of(tensor) == self.geometry


class Apart:
    """Those of a step, by their place among the tensors that autograd saves."""

    def __init__(self) -> None:
        self._found: dict[int, SavedApart] = {}

    def note(self, at: int, tensor: torch.Tensor, slot: int) -> None:
        """Notes one that a program has to know."""
        self._found[at] = SavedApart(slot, geometry_of(tensor))

    def drop(self, start: int) -> None:
        """Drops those that were saved from `start` on: in a call that has a form after all."""
        self._found = {at: one for at, one in self._found.items() if at < start}

    def drop_others(self, seen: Collection[int]) -> None:
        """Drops those that are not in places which are seen."""
        self._found = {at: one for at, one in self._found.items() if at in seen}

    def read_in(self, call: ProgramCall, read: set[int]) -> None:
        """Called for the calls of a program from the last to the first, with the slots that are read later."""
        for at in reversed(range(call.first_save, call.last_save)) if self._found else ():
            one = self._found.get(at)
            if one is not None and one.slot >= 0:
                one.is_last = one.slot not in read
                read.add(one.slot)

    def placed(self, calls: Sequence[ProgramCall]) -> dict[int, SavedApart] | None:
        """Returns them, None if some lie over no memory that a call has given a slot before."""
        known: set[int] = set()
        found: dict[int, SavedApart] = {}
        for call in calls if self._found else ():
            known.update(slot for _, slot in call.enters)
            found.update(self._over(known, call.first_save, call.end_save))
            known.update(slot for _, slot in call.gives)
            known.update(view[1] for view in call.views)
            found.update(self._over(known, call.end_save, call.last_save))
        return found if len(found) == len(self._found) else None

    def _over(self, known: Collection[int], start: int, stop: int) -> dict[int, SavedApart]:
        return {at: self._found[at] for at in range(start, stop) if at in self._found and self._found[at].slot in known}
