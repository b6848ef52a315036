"""What a forward may branch on, as a key: proofs of a module hold as long as it is the same.

Values of plain attributes, what containers, configurations and functions hold, shapes of tensors. Nothing of it keeps
an object alive, and what is too deep or too long to be looked through counts by its class and length.
"""

from __future__ import annotations

import collections
import enum
import functools
import math
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from recoup.runtime.recompute.module_state import walk

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) | {"forward"}
_PLAIN = frozenset([int, float, complex, bool, str, bytes, range, type(None), torch.dtype, torch.device, torch.Size])
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)


class Facts:
    """Looks through the attributes of modules and of what these hold.

    Attributes:
        most_levels, most_items: of what is looked through below an attribute.
    """

    most_levels, most_items = 4, 256

    def of(self, module: nn.Module) -> tuple[Any, ...]:
        """Returns the key of a module and of those in it: classes, modes, attributes."""
        return tuple(fact for _, child in walk(module) for fact in self._of_module(child))

    def _of_module(self, module: nn.Module) -> Iterator[Any]:
        yield type(module)
        yield module.training
        for name, value in module.__dict__.items():
            if name not in _OF_EVERY_MODULE:
                yield name
                yield self._of_value(value, self.most_levels)

    def _of_value(self, value: Any, levels: int) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value if value == value else repr(value)  # NaN
        if isinstance(value, enum.Enum):
            return kind, value.name
        if isinstance(value, type):
            return value
        if hasattr(value, "dtype") and hasattr(value, "shape"):  # of torch, NumPy
            return kind, str(value.dtype), tuple(value.shape), getattr(value, "requires_grad", None), _number_in(value)
        return (kind, *self._inside(value, levels))

    def _inside(self, value: Any, levels: int) -> Iterator[Any]:
        """Yields what tells objects of one class apart."""
        if isinstance(value, dict):
            yield len(value)
            yield from self._of_all((x for item in value.items() for x in item), len(value), levels)
        elif isinstance(value, _CONTAINERS):
            yield len(value)
            ordered = value if not isinstance(value, (set, frozenset)) else sorted(value, key=repr)
            yield from self._of_all(ordered, len(value), levels)
        elif isinstance(value, types.FunctionType):
            yield value.__code__
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            yield from self._of_all((*cells, *(value.__defaults__ or ())), len(cells), levels)
        elif isinstance(value, types.MethodType):
            yield value.__func__.__code__ if isinstance(value.__func__, types.FunctionType) else value.__name__
        elif isinstance(value, types.BuiltinFunctionType):
            yield value.__qualname__
        elif isinstance(value, functools.partial):
            yield from self._of_all((value.func, value.args, value.keywords), 1, levels)
        elif not isinstance(value, (nn.Module, types.ModuleType)):
            attributes = getattr(value, "__dict__", {})
            yield from self._of_all((x for item in attributes.items() for x in item), len(attributes), levels)

    def _of_all(self, values: Iterable[Any], num: int, levels: int) -> Iterator[Any]:
        if levels and num <= self.most_items:
            for value in values:
                yield self._of_value(value, levels - 1)


def _number_in(value: Any) -> str:
    """Returns one of NumPy's numbers, as text; "" of a tensor, whose values are no facts, and of larger arrays."""
    return repr(value) if not isinstance(value, torch.Tensor) and math.prod(value.shape) == 1 else ""
