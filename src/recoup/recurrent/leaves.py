"""Pytrees as a list of tensors and a template; a tensor that occurs twice is one leaf."""

from __future__ import annotations

from typing import Any

import torch

from recoup._pytree import Build, open_nest
from recoup.errors import UsageError


class _Leaf:
    """Stands for the i-th tensor in a template."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Other:
    """A container that is neither list nor tuple: its items, and how to make one like it."""

    __slots__ = ("build", "parts")

    def __init__(self, build: Build, parts: list[Any]) -> None:
        self.build = build
        self.parts = parts


_FIRST = _Leaf(0)


def flatten(nest: Any) -> tuple[list[torch.Tensor], Any]:
    """Returns the distinct tensors of a pytree in order, and the template that `rebuild` needs.

    Containers are those of `_pytree`; any other object is part of the template.
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
            if type(item) is torch.Tensor and id(item) not in seen:  # the common case, without another call
                leaf = seen[id(item)] = _Leaf(len(tensors))
                tensors.append(item)
                items.append(leaf)
            else:
                items.append(_flatten(item, tensors, seen))
        return kind(items)
    opened = open_nest(nest)
    if opened is None:
        return nest
    children, build = opened
    return _Other(build, [_flatten(child, tensors, seen) for child in children])


def rebuild(template: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns the pytree of a template with `tensors` as leaves, in new containers."""
    kind = type(template)
    if kind is _Leaf:
        return tensors[template.index]
    if kind is tuple or kind is list:
        return kind([tensors[t.index] if type(t) is _Leaf else rebuild(t, tensors) for t in template])
    if kind is _Other:
        return template.build([rebuild(part, tensors) for part in template.parts])
    return template


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether the tensor's dtype can carry a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def checked(result: Any) -> tuple[Any, Any]:
    """Returns a step's result as `(state, output)`; raises UsageError if it is no pair."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise UsageError(
            f"recoup.recurrent.scan: `step(state, x)` must return a pair `(state, y)`; got {type(result).__name__}."
        )
    return result
