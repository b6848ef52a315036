"""Views that autograd makes anew after a write through one of them: what their backward takes on real tensors.

On real tensors their node is one `as_strided`, whose backward copies the gradient into memory of the base's size. On
fake ones it is that of the view itself, run again on the base: that of a slice copies as well, that of `view` hands the
gradient on. So where all nodes of such a view hand it on, it is copied before.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from recoup import _torch

_HAND_ON = frozenset(
    ["_reshape_alias", "_unsafe_view", "alias", "permute", "squeeze", "t", "transpose", "unsqueeze", "view"]
)
_WRITTEN = "torch::autograd::CopySlices"  # the node of a base that was written through a view


class RemadeViews:
    """Tells the views that autograd makes anew by that nobody has their results, and copies their gradients."""

    def __init__(self) -> None:
        self._may_come = False
        self._last: tuple[int, weakref.ref[torch.Tensor]] | None = None
        self._hand_on: set[int] = set()
        self._found: set[int] = set()

    def note_write(self, tensor: torch.Tensor) -> None:
        """Notes a tensor that is written in place."""
        self._may_come = self._may_come or (_torch.is_fake(tensor) and tensor._is_view())

    def note(self, index: int, func: Any, results: Sequence[torch.Tensor]) -> None:
        """Notes an op of the forward and what it returned."""
        if not self._may_come:
            return
        self._end_last()
        if func.overloadpacket.__name__ in _HAND_ON:
            self._hand_on.add(index)
            self._last = index, weakref.ref(results[0])

    def copy_gradients(self, loss: torch.Tensor, node_numbers: Sequence[int]) -> None:
        """Has their gradients copied in the backward of `loss`.

        Args:
            node_numbers: of each op so far, that of the first node after it.
        """
        self._end_last()
        if not self._found or loss.grad_fn is None:
            return

        def op_of(node: Any) -> int:
            return bisect.bisect_right(node_numbers, _torch.node_number(node))

        seen, waiting = {loss.grad_fn}, [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if op_of(node) in self._found and self._hands_on(node, op_of):
                node.register_prehook(_copied)
            new = [n for n, _ in node.next_functions if n is not None and n not in seen]
            seen.update(new)
            waiting += new

    def _hands_on(self, node: Any, op_of: Callable[[Any], int]) -> bool:
        """Whether a view's nodes hand its gradient on as it is to the node of a base that was written."""
        is_view = False
        while node is not None and node.name() != _WRITTEN:
            is_view = op_of(node) in self._hand_on
            if not is_view:
                return False
            node = node.next_functions[0][0]
        return is_view and node is not None

    def _end_last(self) -> None:
        if self._last is not None and self._last[1]() is None:
            self._found.add(self._last[0])
        self._last = None


def _copied(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if g is None else g.clone(memory_format=torch.contiguous_format) for g in gradients)
