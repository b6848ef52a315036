"""Sums of gradients: where two gradients of a tensor meet, autograd adds the later to the earlier in place.

It does so where gradients are off and nobody else holds the earlier one, which is dense and no view of another tensor.
Under a dispatch mode it never does (`accumulate` in torch/csrc/autograd/input_buffer.cpp asks `isTensorSubclassLike`).
So a captured sum is a new tensor, and what it would have been added to is let go of by it. In the trace that is let go
of before: the bytes are those of a step that nobody watches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recoup.capture.records import OpRecord, StorageRecord, Sums, user_line


def kind_of_sum(func: object, tensors: Sequence[torch.Tensor], made: OpRecord, *, node: int) -> Sums:
    """Returns whether an op of backward is autograd's own sum, and may be in place; asked as it runs.

    What a node adds by itself is made by it or by such a sum, and what a user's `Function` or hook adds has a line of
    its own.

    Args:
        made: the op that made the first tensor. node: the forward op whose node runs now, or ran last.
    """
    if func is not torch.ops.aten.add.Tensor or len(tensors) != 2 or torch.is_grad_enabled():
        return ""
    if (made.origin == node and not made.sums) or user_line():
        return ""
    one, other = tensors
    if one.layout is not torch.strided or other.layout is not torch.strided or one._is_view() or not _is_dense(one):
        return "anew"
    if one.untyped_storage() is other.untyped_storage():  # of `x + x`: then two hold it
        return "anew"
    is_alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return "in place" if is_alike else "anew"


def let_go_before(ops: Sequence[OpRecord], storages: Sequence[StorageRecord]) -> None:
    """Ends what sums are in place of before them, where they are the last to read it."""
    for index, op in enumerate(ops):
        if op.sums == "in place":
            old = storages[op.inputs[0]]
            if old.free_op == index and 0 <= old.alloc_op < index and op.inputs[0] != op.outputs[0]:
                old.free_op = index - 1


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether it fills its memory, each element once."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes and all(
        stride or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
