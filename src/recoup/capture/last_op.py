"""Tells an op's saved result from the next op's saved input: autograd packs both between the two ops."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from recoup import _torch


class LastOp:
    """The op that ran last, and its results; or a `Function`'s ops, which run without grad, and theirs."""

    def __init__(self) -> None:
        self._func: Any = None
        self._results: list[weakref.ref[torch.Tensor]] = []
        self._inside: list[weakref.ref[torch.Tensor]] = []

    def note(self, func: Any, results: Sequence[torch.Tensor]) -> None:
        """Notes an op and what it returned."""
        self._results = [weakref.ref(result) for result in results]
        if torch.is_grad_enabled():
            self._func = func
            self._inside.clear()
        else:
            self._func = None  # it has no node inside a `Function`
            self._inside += self._results

    def saves(self, is_saved: Callable[[torch.Tensor], bool], *, is_fresh: bool) -> bool:
        """Whether a tensor that is packed now is saved by it, not by the op that comes next.

        Args:
            is_saved: whether a tensor is the one in question.
            is_fresh: whether it is one of the results.
        """
        made = [tensor for get in self._inside if (tensor := get()) is not None and is_saved(tensor)]
        if made and all(tensor.grad_fn is None for tensor in made):
            return True  # a `Function`, at its end, keeps a tensor of its own that is no result
        return is_fresh and self._node_may_save(is_saved)

    def _node_may_save(self, is_saved: Callable[[torch.Tensor], bool]) -> bool:
        if self._func is None:
            return True
        results = [get() for get in self._results]
        # Results that are not differentiable have no node, and are saved by the others'.
        node = next((r.grad_fn for r in results if r is not None and r.grad_fn is not None), None)
        names = _torch.saved_names(node) if node is not None else frozenset()
        if names is None:  # a `Function`
            return True
        returns = self._func._schema.returns
        for position, result in enumerate(results):
            name = returns[position].name if position < len(returns) else None
            if result is not None and is_saved(result) and not names.isdisjoint((name, "result", f"result{position}")):
                return True
        return False
