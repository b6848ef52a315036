"""What a region notes of a module's state is held without the graph that made it.

A model that keeps its last result hands the next forward a tensor with the graph of the whole step before. A note that
held it would make a chain: the graph of a step holds its regions, their notes the step before, and so on. Where no
backward frees what the graphs hold, in a loop of forwards with gradients on, memory would grow with each.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import torch

from recoup import _torch


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a detached alias if a graph made it; both count changes in place together."""
    if type(tensor) is not torch.Tensor or tensor.grad_fn is None:
        return tensor
    if not _torch.num_dispatch_modes():
        return tensor.detach()
    with _torch.without_dispatch_modes():
        return tensor.detach()


class _Cut:
    """Stands in a note for a tensor with a graph."""

    __slots__ = ("alias",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.alias = without_graph(tensor)


class _Alias(torch.autograd.Function):
    """Makes a tensor that is no leaf, so that a forward may change it in place, over the memory of another."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads


def cut(copy: Any) -> bool:
    """Replaces tensors with a graph in a copy of a container; says whether there are any. Sets are left as they are."""
    found = [key for key, item in _items(copy) if type(item) is torch.Tensor and item.grad_fn is not None]
    for key in found:
        copy[key] = _Cut(copy[key])
    return bool(found)


def whole(copy: Any) -> Any:
    """Returns a copy for a replay: in the place of what was cut are tensors of the same memory that have a graph."""
    found = [key for key, item in _items(copy) if type(item) is _Cut]
    if not found:
        return copy
    copy = copy.copy()
    with _torch.grad_enabled():
        for key in found:
            leaf = copy[key].alias.detach().requires_grad_()
            copy[key] = _Alias.apply(leaf)  # type: ignore[no-untyped-call]  # torch leaves `apply` untyped
    return copy


def _items(copy: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(copy, dict):
        return copy.items()
    return enumerate(copy) if isinstance(copy, (list, collections.deque)) else ()
