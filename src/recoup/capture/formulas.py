"""What autograd's own backward formulas run in training, where they run something else while a step is captured.

Some formulas make zeros and write into them. On tensor subclasses, which fake tensors are, and under a dispatch mode
they take the variant of that op which writes into a copy instead (torch's "composite compliance"), so that zeros and
copy are there at a time. A captured step is to be the real one: the op in place is run. What a user's `Function` does
is what it says.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from recoup import _torch
from recoup.runtime import execution_context

_aten = torch.ops.aten
_IN_PLACE = {
    _aten.scatter_add.default: _aten.scatter_add_.default,  # of `gather`, `cummax`
    _aten.scatter.src: _aten.scatter_.src,  # of `sort`, `topk`, `max` along a dimension
    _aten.scatter.value: _aten.scatter_.value,
    _aten.index_put.default: _aten._index_put_impl_.default,  # of indices in brackets
    _aten.index_add.default: _aten.index_add_.default,  # of `index_select`
    _aten.put.default: _aten.put_.default,  # of `take`
    _aten.masked_scatter.default: _aten.masked_scatter_.default,
}
_ZEROS = frozenset([_aten.new_zeros.default, _aten.zeros.default, _aten.zeros_like.default])


class Formulas:
    """Tells the ops that a formula runs on zeros which it has just made."""

    def __init__(self) -> None:
        self._zeros: weakref.ref[torch.Tensor] | None = None

    def on_real(self, func: Any, args: Sequence[Any]) -> Any:
        """Returns the op that runs in training in place of `func`, in backward."""
        zeros, self._zeros = self._zeros() if self._zeros is not None else None, None
        is_formula = func in _IN_PLACE and zeros is not None and zeros is args[0] and _is_ordinary(zeros)
        return _IN_PLACE[func] if is_formula else func

    def note(self, func: Any, result: Any) -> Any | None:
        """Notes an op of backward and what it returned; returns the node that ran it."""
        node = _torch.current_backward_node()
        is_formula = func in _ZEROS and not torch.is_grad_enabled() and not execution_context.is_recomputing()
        if is_formula and not isinstance(node, torch.autograd.function.BackwardCFunction):
            self._zeros = weakref.ref(result)
        return node


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether autograd would have written into a tensor, were it not watched: not into one of a class of its own."""
    return type(tensor) is torch.Tensor or _torch.is_fake(tensor)
