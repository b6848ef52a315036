"""State that modules carry from step to step in attributes: found by comparison, lifted into the loop, put back.

A membrane potential bound anew in every step, a BatchNorm statistic changed in place, a counter: whatever a step
changes is part of the loop's state, whether or not the step returns it. On the CPU contents are compared. On a device
that would synchronise, so there the ops that write are recorded (`dead_state.Writes`).
"""

from __future__ import annotations

from typing import Any

import torch

from recoup.errors import UsageError
from recoup.recurrent.closure_inspection import ABSENT, Place, Reached
from recoup.recurrent.dead_state import DROPPED, UnreadPlace, Watch, Writes
from recoup.runtime import execution_context
from recoup.runtime.recompute.rng_state import version_of

_CHANGED_LATE = (
    "recoup.recurrent: `{name}` did not change in the first steps of the loop but changed later, so its earlier value "
    "is gone. Hand it through the loop's state, or change it in every step."
)
_COLLECTS = (
    "recoup.recurrent: `{name}` collects something in every step of the loop ({before} entries before a step, {after} "
    "after). What is to leave the loop must be returned by the step: `step(state, x) -> (state, y)` with it in `y`."
)


class _Seen:
    """The contents of a place at one moment."""

    __slots__ = ("copy", "items", "place", "value", "version", "writes")

    def __init__(self, place: Place, writes: Writes | None) -> None:
        self.place = place
        self.writes = writes
        self.value = place.get()
        self.version = 0
        self.items: tuple[Any, ...] = ()
        self.copy: Any = None
        if isinstance(self.value, torch.Tensor):
            self.version = version_of(self.value)
            self.copy = self.value.detach().clone() if writes is not None else None
        elif isinstance(self.value, list):
            self.items = tuple(self.value)

    def differs(self, now: Any) -> bool:
        """Whether `now` differs from the contents seen."""
        if now is self.value:
            if isinstance(now, torch.Tensor):
                return version_of(now) != self.version or self._was_overwritten()
            if isinstance(now, list):
                return len(now) != len(self.items) or any(a is not b for a, b in zip(now, self.items, strict=True))
            return False
        if type(now) is type(self.value) and isinstance(now, (int, float, bool, str)):
            return bool(now != self.value)
        return True

    def then(self) -> Any:
        """Returns the contents seen; the copy of them if they were changed in place since."""
        if isinstance(self.value, list):
            return list(self.items)
        if isinstance(self.value, torch.Tensor) and self.copy is not None and self._was_overwritten():
            return self.copy
        return self.value

    def _was_overwritten(self) -> bool:
        """Whether the contents differ: BatchNorm's kernel and writes through `.data` bump no version counter."""
        if self.writes is None:
            return False
        if execution_context.device_type(self.value) != "cpu":
            return self.writes.has_written(self.value)
        return not torch.equal(self.copy, self.value.detach())


class Carried:
    """The attributes and closure cells that steps change, in a fixed order.

    Attributes:
        places: where the state is kept.
        in_place: for each place, whether its tensor is changed in place.
        unread: for each place, whether its value is dead (no step reads it), so that it is not held.
        writes: mode to run a step under until `learn` is called; None if contents are compared.
    """

    def __init__(self, reached: Reached) -> None:
        self.places: list[Place | UnreadPlace] = []
        self.in_place: list[bool] = []
        self.unread: list[bool] = []
        self._reached = reached
        self._keys: set[tuple[int, Any]] = set()
        self.writes: Writes | None = None
        self._seen = self._look(copies=True)

    def _look(self, *, copies: bool) -> dict[tuple[int, Any], _Seen]:
        writes = Writes() if copies else None
        seen = {k: _Seen(p, writes) for k, p in self._reached.places() if k not in self._keys}
        tensors = [s.value for s in seen.values() if s.copy is not None]
        self.writes = writes if any(execution_context.device_type(t) != "cpu" for t in tensors) else None
        return seen

    def learn(self) -> list[Any]:
        """Adds places that the step just run has changed; returns what the added ones held before it.

        Raises:
            UsageError: if a list grew: what it collects would be lost.
        """
        before, found = self._seen, []
        for key, place in self._reached.places():
            then = before.get(key)
            now = place.get()
            if key in self._keys or (then is not None and not then.differs(now)):
                continue
            items = then.items if then is not None and isinstance(then.value, list) else None
            if isinstance(now, list) and items is not None and len(now) != len(items):
                raise UsageError(_COLLECTS.format(name=place.name, before=len(items), after=len(now)))
            self._keys.add(key)
            self.places.append(place)
            self.in_place.append(then is not None and isinstance(now, torch.Tensor) and now is then.value)
            self.unread.append(False)
            found.append(then.then() if then is not None else ABSENT)
        self._seen, self.writes = {}, None
        return found

    def watch(self, *, copies: bool) -> None:
        """Notes the contents of every place for the next `learn` or `check`."""
        self._seen = self._look(copies=copies)

    def check(self) -> None:
        """Raises UsageError if a place that is not known changed since `watch`."""
        for key, place in self._reached.places():
            then = self._seen.get(key)
            if key not in self._keys and (then is None or then.differs(place.get())):
                now = place.get()
                if isinstance(now, list) and then is not None and len(now) > len(then.items):
                    raise UsageError(_COLLECTS.format(name=place.name, before=len(then.items), after=len(now)))
                raise UsageError(_CHANGED_LATE.format(name=place.name))
        self._seen = {}

    def find_unread(self, entered: list[Any], passed_on: list[torch.Tensor], watch: Watch) -> bool:
        """Marks tensors that the step just run wrote and never read as dead; returns whether there are any.

        Args:
            entered: the contents of the places before the step.
            passed_on: tensors that the step returned.
            watch: the mode under which the step ran.
        """
        held = {t.untyped_storage()._cdata for t in passed_on if t.layout is torch.strided}
        for i, (place, before) in enumerate(zip(self.places, entered)):
            if self.in_place[i] or not isinstance(before, torch.Tensor) or not isinstance(place, Place):
                continue
            is_new = isinstance(place.get(), torch.Tensor) and not watch.has_taken(before)
            if is_new and before.untyped_storage()._cdata not in held:
                self.unread[i] = True
                self.places[i] = UnreadPlace(place)
        return any(self.unread)

    def cover(self) -> None:
        """Stores an `Unread` in every place whose value is not held."""
        for place, unread in zip(self.places, self.unread, strict=True):
            if unread:
                place.put(DROPPED)

    def uncover(self, values: list[Any]) -> None:
        """Stores `values` in the places that hold an `Unread`, after a step that failed."""
        for place, value in zip(self.places, values):
            if place.get() is DROPPED:
                place.put(value)

    def read(self, *, whole: bool = False) -> list[Any]:
        """Returns the current contents of the places; with `whole`, also of those that are not held."""
        if whole or True not in self.unread:
            return [place.get() for place in self.places]
        return [DROPPED if unread else place.get() for place, unread in zip(self.places, self.unread, strict=True)]

    def write(self, values: list[Any]) -> None:
        """Stores `values` in the places."""
        for place, value in zip(self.places, values, strict=True):
            place.put(value)
