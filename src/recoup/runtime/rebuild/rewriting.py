"""What ops of a rebuild may write over: storages made in it, of which nobody wants what is there any more.

An op in place that writes to a part of a storage runs again on the storage itself then, else on a copy; an elementwise
op of the forward's runs in place (`shortcuts.targets`).
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch

from recoup.runtime.rebuild.kept import laid, overlap
from recoup.runtime.rebuild.op_function import OpFunction
from recoup.runtime.rebuild.values import Geometry


class Rewriting:
    """Runs an op in place again, on a copy of the storage that it wrote to.

    Attributes:
        op: the overload. part: geometry of what it writes over. is_whole: it is the whole storage, however large.
    """

    __slots__ = ("_function", "is_whole", "part")

    def __init__(self, op: Any, part: Geometry) -> None:
        self._function = OpFunction(op)
        self.part = part
        self.is_whole = False

    @property
    def op(self) -> Any:
        """The overload."""
        return self._function.op

    def __call__(self, whole: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the whole storage after the op."""
        copied = torch.empty_strided(whole.size(), whole.stride(), dtype=whole.dtype, device=whole.device).copy_(whole)
        return self.over(copied, *args, **kwargs)

    def over(self, whole: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Writes over the storage itself and returns it."""
        size, stride, offset, dtype = self.part
        if self.is_whole:
            part = whole
        else:
            part = whole.as_strided(size, stride, offset) if whole.dtype is dtype else laid(whole, self.part)
        self._function.call(part, *args, **kwargs)
        return whole


_V = TypeVar("_V")


class Versions(Generic[_V]):
    """Which storages of a rebuild may be written over: their earlier contents are wanted elsewhere in them only.

    A GRU cell writes over one chunk of its gates after another, and autograd saves each chunk then: all of them lie in
    one storage in the end, as in the forward.

    Args:
        wanted: of each value that somebody waits for, the geometries that it is wanted in.
    """

    def __init__(self, wanted: dict[_V, list[Geometry]]) -> None:
        self._wanted = wanted
        self._parts: dict[_V, list[Geometry]] = {}

    def add(self, value: _V, before: _V | None = None) -> None:
        """Notes a value made in this rebuild, in a storage of its own or in that of the one `before`."""
        self._parts[value] = [*(() if before is None else self._parts[before]), *self._wanted.get(value, ())]

    def is_free(self, value: _V, part: Geometry) -> bool:
        """Whether `part` of the storage that was made for a value may be written over."""
        parts = self._parts.get(value)
        if parts is None or self._wanted.get(value) == []:  # not made here, or wanted as a whole
            return False
        return not any(overlap(part, other) for other in parts)
