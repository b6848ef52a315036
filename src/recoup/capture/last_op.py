"""Tells an op's saved result from the next op's saved input: autograd packs both between the two ops."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from recoup import _torch


class LastOp:
    """The op that ran last, and those of its results that it may still save."""

    def __init__(self) -> None:
        self._func: Any = None
        self._unsaved: dict[int, weakref.ref[torch.Tensor]] = {}

    def note(self, func: Any, results: Sequence[torch.Tensor]) -> None:
        """Notes an op and what it returned."""
        self._func = func if torch.is_grad_enabled() else None  # it has no node inside a `Function`
        self._unsaved = {position: weakref.ref(result) for position, result in enumerate(results)}

    def saves(self, is_saved: Callable[[torch.Tensor], bool]) -> bool | None:
        """Whether it is the op that saves a result now, which it does once; None if it has no node that says so.

        Args:
            is_saved: whether a result is the tensor that is saved now.
        """
        if self._func is None:
            return None
        for position, get in self._unsaved.items():
            result = get()
            if result is not None and is_saved(result) and _saves_result(result.grad_fn, self._func, position):
                del self._unsaved[position]
                return True
        return False


def _saves_result(node: Any, func: Any, position: int) -> bool:
    """Whether the node of `func` saves that one of its results; a `Function`'s node does not say: it is taken to."""
    saved = _torch.saved_names(node) if node is not None else frozenset()
    if saved is None:
        return True
    returns = func._schema.returns
    name = returns[position].name if position < len(returns) else None
    return not saved.isdisjoint((name, "result", f"result{position}"))
