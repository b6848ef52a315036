"""How tensors lie whose sizes are others in every step: padded to the longest text, or chosen by a router.

Two steps that did the same with tensors of other sizes tell which sizes those are; `Varied` is what the geometries of a
tensor in both have in common. [Note: dynamic shapes] is in `dynamic_program.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from recoup.runtime.rebuild.values import Geometry, geometry_of


class Varied:
    """The geometry of a tensor whose sizes vary: equal to every geometry of the kind.

    Of a kind are those of one dtype and as many dimensions, which lie in the same order, all contiguous or none, and
    have the same sizes in the dimensions that do not vary, and more than one element in those that do: dimensions of
    one lie anyhow, and kernels treat them apart.

    Attributes:
        dtype: of the tensor.
    """

    __slots__ = ("_last", "_offset", "_order", "_sizes", "dtype")

    def __init__(self, sizes: tuple[int | None, ...], geometry: Geometry, offset: int | None) -> None:
        self._sizes = sizes
        self._order = _order(geometry, sizes)
        self._offset = offset
        self.dtype: torch.dtype = geometry[3]
        self._last: Any = None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Varied):
            return self is other
        if other == self._last:  # the tensors of a step have few geometries
            return True
        if not isinstance(other, tuple) or not self._is_like(other):
            return False
        self._last = other
        return True

    __hash__ = object.__hash__

    def _is_like(self, geometry: Geometry) -> bool:
        size, _, offset, dtype = geometry
        if dtype is not self.dtype or len(size) != len(self._sizes):
            return False
        for n, want in zip(size, self._sizes, strict=True):
            if n <= 1 if want is None else n != want:
                return False
        return self._offset in (None, offset) and _order(geometry, self._sizes) == self._order

    def laid_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor laid out in the order of the kind, densely."""
        if geometry_of(tensor) == self:
            return tensor
        order = [*range(tensor.dim())] if self._order is None else [i for i, is_expanded in self._order]
        rest = [i for i in range(tensor.dim()) if i not in order]
        turned = tensor.permute(*order, *rest).contiguous()
        back = [0] * tensor.dim()
        for place, i in enumerate((*order, *rest)):
            back[i] = place
        return turned.permute(*back)

    def with_sizes_of(self, geometry: Geometry) -> Varied | None:
        """Returns the kind that has this one's and another geometry, None if there is none."""
        return _varied(self._sizes, self._order, self._offset, self.dtype, geometry)


def _order(geometry: Geometry, sizes: Sequence[int | None]) -> tuple[tuple[int, bool], ...] | None:
    """Returns the dimensions from the outermost to the innermost, and which are expanded; None where contiguous."""
    size, stride, _, _ = geometry
    dims = [i for i, n in enumerate(sizes) if n is None or n > 1]
    step = 1
    for i in reversed(dims):
        if stride[i] != step:
            return tuple([(i, stride[i] == 0) for i in sorted(dims, key=lambda i: (-stride[i], i))])
        step *= size[i]
    return None


def _varied(
    sizes: Sequence[int | None], order: Any, offset: int | None, dtype: torch.dtype, other: Geometry
) -> Varied | None:
    if dtype is not other[3] or len(sizes) != len(other[0]):
        return None
    common = tuple([n if n == m else None for n, m in zip(sizes, other[0], strict=True)])
    if any(m <= 1 for n, m in zip(common, other[0], strict=True) if n is None):
        return None
    found = Varied(common, other, offset if offset == other[2] else None)
    return found if found._order == order or _without(order, common) == found._order else None


def _without(order: Any, sizes: Sequence[int | None]) -> Any:
    return order if order is None else tuple([(i, e) for i, e in order if (n := sizes[i]) is None or n > 1])


def common(one: Geometry | Varied | None, other: Geometry | None) -> Geometry | Varied | None:
    """Returns what two geometries have in common: themselves, if they are the same.

    Raises:
        ValueError: they are of different kinds.
    """
    if one is None or other is None:
        if one is other:
            return None
        raise ValueError("one of them is unknown")
    if isinstance(one, Varied):
        found = one.with_sizes_of(other)
    elif one == other:
        return one
    else:
        sizes = tuple([n if n == m else None for n, m in zip(one[0], other[0], strict=False)])
        found = _varied(tuple(one[0]), _order(one, sizes), one[2], one[3], other)
        if any(n <= 1 for n, m in zip(one[0], sizes, strict=False) if m is None):
            found = None
    if found is None:
        raise ValueError("they are of different kinds")
    return found


_NEXT, _ONE, _BEFORE = range(0, -3, -1)
"""Groups of no dimension: one of a single element, which has the stride of the next times its size, one, or the stride
of the one before."""


def merged(geometry: Geometry, groups: Sequence[int]) -> Geometry | None:
    """Returns how a tensor lies with so many neighbouring dimensions each taken for one; None if that is no view."""
    size, stride, offset, dtype = geometry
    sizes: list[int] = []
    strides: list[int] = []
    last = len(size)
    for num in reversed(groups):
        first = last - max(num, 0)
        for i in range(first, last - 1):
            if stride[i] != stride[i + 1] * size[i + 1]:
                return None
        sizes.append(math.prod(size[first:last]))
        if num > 0:
            strides.append(stride[last - 1])
        elif num == _NEXT:
            strides.append(sizes[-2] * strides[-1] if strides else 1)
        else:
            strides.append(1 if num == _ONE or not first else stride[first - 1])
        last = first
    return torch.Size(sizes[::-1]), tuple(strides[::-1]), offset, dtype


def grouping(pairs: Sequence[tuple[Geometry, Geometry]]) -> tuple[int, ...] | None:
    """Returns the groups by which `merged` makes the second geometry of each pair of the first, None if none does."""
    handed, read = pairs[0]
    for groups in _groupings(len(handed[0]), read[0]):
        if all([merged(one, groups) == other for one, other in pairs]):
            return groups
    return None


def turned(geometry: Geometry) -> Geometry:
    """Returns how a tensor lies with its last two dimensions in the other order."""
    size, stride, offset, dtype = geometry
    if len(size) < 2:
        return geometry
    return torch.Size((*size[:-2], size[-1], size[-2])), (*stride[:-2], stride[-1], stride[-2]), offset, dtype


def _groupings(num: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields the ways to take `num` dimensions for some of these sizes."""
    if not sizes:
        if not num:
            yield ()
        return
    firsts = [*range(1, num + 1), *((_NEXT, _ONE, _BEFORE) if sizes[0] == 1 else ())]
    for first in firsts:
        for rest in _groupings(num - max(first, 0), sizes[1:]):
            yield (first, *rest)


class Layout:
    """How an op that runs again reads one of the tensors that its call was handed: noted in each step.

    Attributes:
        index: among all that is noted in a step. position: of the tensor among the call's. groups: see `merged`.
        kind: of the geometry that the tensor has. is_turned: its last two dimensions change places first.
    """

    __slots__ = ("_is_whole", "groups", "index", "is_turned", "kind", "position")

    def __init__(
        self, index: int, position: int, groups: tuple[int, ...], kind: Geometry | Varied, *, is_turned: bool
    ) -> None:
        self.index = index
        self.is_turned = is_turned
        self.position = position
        self.groups = groups
        self.kind = kind
        self._is_whole = all([num == 1 for num in groups])

    def of(self, tensor: torch.Tensor) -> Geometry | None:
        """Returns it in this step, None if the tensor lies otherwise."""
        geometry = geometry_of(tensor)
        if geometry != self.kind:
            return None
        if self.is_turned:
            geometry = turned(geometry)
        return geometry if self._is_whole else merged(geometry, self.groups)


class Regrouped:
    """How an op that runs again reads what another op of its call has made.

    Attributes:
        groups: see `merged`.
    """

    __slots__ = ("groups",)

    def __init__(self, groups: tuple[int, ...]) -> None:
        self.groups = groups

    def of(self, made: torch.Tensor) -> torch.Tensor:
        """Returns it, of the other op's result."""
        geometry = merged(geometry_of(made), self.groups)
        assert geometry is not None  # it lies in the order that it had in both steps
        return made.as_strided(*geometry[:3])


class Reshaped:
    """How an op that runs again reads what another op of its call has made, both of them contiguous.

    Attributes:
        sizes: of the dimensions, None where one varies. dims: of what was made, those that vary, in the same order.
    """

    __slots__ = ("dims", "sizes")

    def __init__(self, sizes: tuple[int | None, ...], dims: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.dims = dims

    def of(self, made: torch.Tensor) -> torch.Tensor:
        """Returns it, of the other op's result."""
        varied = iter(self.dims)
        return made.view([made.size(next(varied)) if n is None else n for n in self.sizes])


def reshaping(pairs: Sequence[tuple[Geometry, Geometry]]) -> Reshaped | None:
    """Returns how the second geometry of each pair comes of the first, None if that is not known."""
    if any(_order(one, one[0]) is not None or _order(other, other[0]) is not None for one, other in pairs):
        return None
    found = []
    for geometries in zip(*pairs, strict=True):
        columns = [*zip(*[size for size, *_ in geometries], strict=False)]
        if len({len(size) for size, *_ in geometries}) > 1:
            return None
        found.append([sizes[0] if len({*sizes}) == 1 else None for sizes in columns])
    made, read = found
    dims, places = [[i for i, n in enumerate(sizes) if n is None] for sizes in (made, read)]
    are_same = all([one[0][i] == other[0][j] for one, other in pairs for i, j in zip(dims, places, strict=False)])
    return Reshaped(tuple(read), tuple(dims)) if len(dims) == len(places) and are_same else None


Lay = Layout | Regrouped | Reshaped | None
"""How an op reads a tensor whose geometry varies; None: as it comes from the op that made it."""


class Number:
    """Stands for an argument of an op that runs again: one that its call was handed, noted in each step.

    Attributes:
        index: among all that is noted. place: among the call's arguments, in its list or tuple.
    """

    __slots__ = ("index", "place")

    def __init__(self, index: int, place: tuple[int, ...]) -> None:
        self.index = index
        self.place = place


class AnyOf:
    """Stands for a number that varies, among what a call is handed: equal to all of its class.

    Attributes:
        kind: the class. value: what it was in the step that the program was made of.
    """

    __slots__ = ("kind", "value")

    def __init__(self, value: Any) -> None:
        self.kind = type(value)
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is self.kind or (isinstance(other, AnyOf) and other.kind is self.kind)

    __hash__ = object.__hash__
