"""Nests of tensors as a list of tensors and a template; a tensor that occurs twice is one leaf."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from recoup.errors import UsageError


class _Leaf:
    """Stands for the i-th tensor of a nest."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


_FIRST = _Leaf(0)


def flatten(nest: Any) -> tuple[list[torch.Tensor], Any]:
    """Returns the distinct tensors of `nest` in order, and the template that `rebuild` needs.

    Lists, tuples, named tuples, dicts and dataclasses are walked; anything else is handed on as it is.
    """
    tensors: list[torch.Tensor] = []
    if type(nest) is torch.Tensor:
        return [nest], _FIRST
    return tensors, _flatten(nest, tensors, {})


def _flatten(nest: Any, tensors: list[torch.Tensor], seen: dict[int, _Leaf]) -> Any:
    if isinstance(nest, torch.Tensor):
        leaf = seen.get(id(nest))
        if leaf is None:
            leaf = seen[id(nest)] = _Leaf(len(tensors))
            tensors.append(nest)
        return leaf
    kind = type(nest)
    if kind is tuple or kind is list:
        if not nest:
            return nest
        items = []
        for item in nest:
            if type(item) is torch.Tensor and id(item) not in seen:  # what most items are, without another call
                leaf = seen[id(item)] = _Leaf(len(tensors))
                tensors.append(item)
                items.append(leaf)
            else:
                items.append(_flatten(item, tensors, seen))
        return kind(items)
    if isinstance(nest, (tuple, list)):
        items = [_flatten(item, tensors, seen) for item in nest]
        return kind(*items) if hasattr(nest, "_fields") else kind(items)
    if isinstance(nest, dict):
        mapped = {key: _flatten(item, tensors, seen) for key, item in nest.items()}
        return mapped if kind is dict else kind(mapped)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        fields = [f.name for f in dataclasses.fields(nest) if f.init]
        return dataclasses.replace(nest, **{n: _flatten(getattr(nest, n), tensors, seen) for n in fields})
    return nest


def rebuild(template: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns the nest again, with new containers around `tensors`."""
    kind = type(template)
    if kind is _Leaf:
        return tensors[template.index]
    if kind is tuple or kind is list:
        return kind([tensors[t.index] if type(t) is _Leaf else rebuild(t, tensors) for t in template])
    if isinstance(template, (tuple, list)):
        items = [rebuild(item, tensors) for item in template]
        return kind(*items) if hasattr(template, "_fields") else kind(items)
    if isinstance(template, dict):
        mapped = {key: rebuild(item, tensors) for key, item in template.items()}
        return mapped if kind is dict else kind(mapped)
    if dataclasses.is_dataclass(template) and not isinstance(template, type):
        fields = [f.name for f in dataclasses.fields(template) if f.init]
        return dataclasses.replace(template, **{n: rebuild(getattr(template, n), tensors) for n in fields})
    return template


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether the tensor's dtype can carry a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def checked(result: Any) -> tuple[Any, Any]:
    """Returns what a step returned if it is a pair; raises UsageError."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise UsageError(
            f"recoup.recurrent.scan: `step(state, x)` must return a pair `(state, y)`; got {type(result).__name__}."
        )
    return result
