"""Finds what a step function can reach: modules, tensors, random streams, and places where it may keep state.

A step is called with a state and an input, but it closes over modules and more. They are found by looking where Python
keeps such things: bound objects, closure cells, defaults, `functools.partial`, globals a function names, attributes.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recoup._reachable import names_in
from recoup.thresholds import MOST_OBJECTS

_LIBRARIES = ("torch", "numpy", "builtins", "functools", "itertools", "math", "recoup")
_ATOMS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, types.ModuleType, type)
_INTERNALS = frozenset(nn.Module().__dict__) - {"_buffers"} | {"forward"}

ABSENT = object()


class Place:
    """Where something is kept: an entry of an attribute dictionary, or a closure cell."""

    __slots__ = ("_key", "_owner", "name")

    def __init__(self, owner: Any, key: Any, name: str) -> None:
        self._owner = owner
        self._key = key
        self.name = name

    def get(self) -> Any:
        """Returns the current contents; `ABSENT` if there are none."""
        if isinstance(self._owner, dict):
            return self._owner.get(self._key, ABSENT)
        try:
            return self._owner.cell_contents
        except ValueError:
            return ABSENT

    def put(self, value: Any) -> None:
        """Stores `value` there; `ABSENT` removes the entry."""
        if not isinstance(self._owner, dict):
            self._owner.cell_contents = value
        elif value is ABSENT:
            self._owner.pop(self._key, None)
        else:
            self._owner[self._key] = value


class Reached:
    """The objects that a step function can reach.

    Attributes:
        modules: modules, including all their submodules.
        tensors: other tensors that a step may read, by the name under which they were found.
        streams: explicit random number generators.
    """

    def __init__(self, step: Any) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[torch.Tensor] = []
        self.streams: list[Any] = []
        self._owners: list[tuple[dict[Any, Any], str, bool]] = []
        self._cells: list[tuple[types.CellType, str]] = []
        self._seen: set[int] = set()
        self._held: list[Any] = []
        todo: list[tuple[Any, str]] = [(step, "step")]
        while todo and len(self._seen) < MOST_OBJECTS:
            found, name = todo.pop()
            if isinstance(found, _ATOMS) or id(found) in self._seen:
                continue
            self._seen.add(id(found))
            self._held.append(found)  # keeps the object alive, so that its id is not reused during the walk
            todo += self._look(found, name)
        self._held.clear()

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yields the parameters of all modules, each once."""
        seen: set[int] = set()
        for module in self.modules:
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def places(self) -> Iterator[tuple[tuple[int, Any], Place]]:
        """Yields every place where state may be kept, with a key that identifies it."""
        for owner, prefix, is_module in self._owners:
            for key, value in list(owner.items()):
                if is_module and key in _INTERNALS:
                    continue
                name = f"{prefix}.{key}"
                if type(value) is dict:
                    for inner in list(value):
                        yield (id(value), inner), Place(value, inner, f"{prefix}.{inner}")
                else:
                    yield (id(owner), key), Place(owner, key, name)
        for cell, name in self._cells:
            yield (id(cell), None), Place(cell, None, name)

    def _look(self, found: Any, name: str) -> list[tuple[Any, str]]:
        if isinstance(found, nn.Module):
            for path, module in found.named_modules():
                if module is found or id(module) not in self._seen:
                    self._seen.add(id(module))
                    self._add_module(module, f"{name}.{path}" if path else name)
            return [
                (value, f"{name}.{key}")
                for module in found.modules()
                for key, value in [*module.__dict__.items(), *module._buffers.items()]
                if key not in _INTERNALS and key != "_buffers"
            ]
        if isinstance(found, torch.Tensor):
            self.tensors.append(found)
            return []
        if isinstance(found, (torch.Generator, random.Random)) or type(found).__module__.startswith("numpy.random"):
            self.streams.append(found)
            return []
        if isinstance(found, functools.partial):
            return [(found.func, name), (found.args, name), (found.keywords, name)]
        if isinstance(found, types.MethodType):
            owner = found.__self__
            return [(owner, getattr(owner, "__name__", type(owner).__name__)), (found.__func__, name)]
        if isinstance(found, types.FunctionType):
            return self._look_into_function(found)
        if isinstance(found, (list, tuple, set, frozenset)):
            return [(item, f"{name}[{i}]") for i, item in enumerate(found)]
        if isinstance(found, dict):
            return [(item, f"{name}[{key!r}]") for key, item in found.items()]
        attributes = getattr(found, "__dict__", None)
        if not isinstance(attributes, dict) or _is_of_library(type(found).__module__):
            return []
        self._owners.append((attributes, name, False))
        call = vars(type(found)).get("__call__")
        return [(value, f"{name}.{key}") for key, value in attributes.items()] + [(call, name)]

    def _add_module(self, module: nn.Module, name: str) -> None:
        self.modules.append(module)
        self._owners += [(module.__dict__, name, True), (module._buffers, name, False)]

    def _look_into_function(self, function: types.FunctionType) -> list[tuple[Any, str]]:
        if _is_of_library(function.__module__):
            return []
        found: list[tuple[Any, str]] = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._cells.append((cell, name))
            try:
                found.append((cell.cell_contents, name))
            except ValueError:
                continue
        found += [(value, function.__name__) for value in function.__defaults__ or ()]
        found += list(zip((function.__kwdefaults__ or {}).values(), (function.__kwdefaults__ or {}).keys()))
        for name in sorted(names_in(function.__code__)[0]):
            if name in function.__globals__:
                found.append((function.__globals__[name], name))
        return found


def _is_of_library(module_name: str | None) -> bool:
    return module_name is not None and module_name.partition(".")[0] in _LIBRARIES
