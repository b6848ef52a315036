"""Tensors in nests of lists, tuples, dicts and dataclasses: taken out, put back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], Any], nest: Any) -> Any:
    """Returns `nest` with every tensor replaced by `function(tensor)`.

    Lists, tuples, named tuples, dicts (their subclasses too, where they can be made anew) and dataclasses are walked
    and copied; anything else is handed on as it is. A container without a tensor comes back itself.
    """
    if isinstance(nest, torch.Tensor):
        return function(nest)
    if isinstance(nest, (list, tuple)):
        items = [map_tensors(function, item) for item in nest]
        if all(new is old for new, old in zip(items, nest, strict=True)):
            return nest
        if type(nest) in (list, tuple):
            return type(nest)(items)
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    if isinstance(nest, dict):
        mapped = {key: map_tensors(function, item) for key, item in nest.items()}
        if all(mapped[key] is nest[key] for key in mapped):
            return nest
        return mapped if type(nest) is dict else type(nest)(mapped)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        changes = {}
        for field in dataclasses.fields(nest):
            old = getattr(nest, field.name, None)
            new = map_tensors(function, old)
            if new is not old:
                changes[field.name] = new
        if not changes:
            return nest
        try:
            return dataclasses.replace(nest, **changes)
        except (TypeError, ValueError):
            return nest
    return nest


def iterate_tensors(nest: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of `nest` in order."""
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, (list, tuple)):
        for item in nest:
            yield from iterate_tensors(item)
    elif isinstance(nest, dict):
        for item in nest.values():
            yield from iterate_tensors(item)
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        for field in dataclasses.fields(nest):
            yield from iterate_tensors(getattr(nest, field.name, None))
