"""Which tensors hold what a kernel left there: two runs of one forward give other bytes, and neither is wrong.

Some kernels hand out results that they do not write, and `torch.empty` hands out memory. Nobody reads them, but
autograd may save them, and a comparison of two forwards must leave them out. They are known by op and position of the
result.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from recoup import _torch

_EMPTY = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
# Results that are written only where dropout is drawn: the state of the random stream it began with.
# Efficient: ATen/native/transformers/cuda/attention.cu, `_efficient_attention_forward` ("Not using dropout": `empty`).
# Flash: ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_fwd`. cuDNN: attention.cu again.
_WITHOUT_DROPOUT = {
    "_scaled_dot_product_efficient_attention": (2, 3),
    "_efficient_attention_forward": (2, 3),
    "_scaled_dot_product_flash_attention": (6,),
    "_flash_attention_forward": (2,),
    "_scaled_dot_product_cudnn_attention": (6, 7),
    "_cudnn_attention_forward": (6, 7),
    "_scaled_dot_product_fused_attention_overrideable": (6, 7),
}
# Flash's `unused` is never written; of the CTC loss's `log_alpha` what lies behind each target's length is not
# (ATen/native/LossCTC.cpp, `ctc_loss_cpu_template`).
_ALWAYS = {
    "_scaled_dot_product_flash_attention": (7,),
    "_flash_attention_forward": (3,),
    "_ctc_loss": (1,),
}
# Autograd saves this op's noise, which comes from `torch.empty_like`, before the op is run; in evaluation it stays so.
_NOISE = "rrelu_with_noise"


class Uninitialised:
    """Follows, told of every op, which storages hold what a kernel left there."""

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage was handed out and not written since."""
        if tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        found = self._storages.get(storage._cdata)
        return found is not None and found() is storage

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Takes note of an op that ran."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[position] if position < len(args) else kwargs.get(argument.name)
                for item in written if isinstance(written, (list, tuple)) else (written,):
                    if isinstance(item, torch.Tensor) and item.layout is torch.strided:
                        self._storages.pop(item.untyped_storage()._cdata, None)
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        positions = _positions(func, args, kwargs)
        for position, found in enumerate(outputs):
            if not isinstance(found, torch.Tensor) or found.layout is not torch.strided:
                continue
            # Bytes beside a result are a kernel's own workspace (recurrent layers): parts are never written.
            if position in positions or (position > 0 and found.dtype is torch.uint8):
                storage = found.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)


def saves_unwritten(roots: Iterable[Any], number: int, tensor: torch.Tensor) -> bool:
    """Whether the node with this number saved `tensor` as its kernel left it.

    Told without following ops, which composite ops notice: under a dispatch mode some run otherwise.

    Args:
        roots: nodes of the graph, among whose ancestors the node is looked for.
        number: as nodes are counted.
    """
    pending, seen = [root for root in roots if root is not None], set()
    while pending:
        node = pending.pop()
        found = _torch.node_number(node)
        if found == number:
            return tensor.grad_fn is None and _leaves_unwritten(node, tensor)
        if found > number and node not in seen:
            seen.add(node)
            pending += [parent for parent, _ in node.next_functions if parent is not None]
    return False


def _leaves_unwritten(node: Any, tensor: torch.Tensor) -> bool:
    name = re.sub(r"Backward\d*$", "", node.name())
    if name in map(_node_name, _WITHOUT_DROPOUT):
        return not tensor.is_floating_point() and not node._saved_dropout_p
    return name in map(_node_name, (*_ALWAYS, _NOISE))


def _node_name(op: str) -> str:
    """Returns the name of the op's node in a graph: `_ctc_loss` makes a `CtcLossBackward0`."""
    return "".join(word.capitalize() for word in op.split("_"))


def _positions(func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    """Returns the positions of the op's results that it does not write."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "aten":
        return ()
    if name in _EMPTY:
        return (0,)
    found: tuple[int, ...] = _ALWAYS.get(name, ())
    if name in _WITHOUT_DROPOUT and not _dropout(func, args, kwargs):
        found += _WITHOUT_DROPOUT[name]
    return found


def _dropout(func: Any, args: Any, kwargs: Any) -> float:
    """Returns the probability that the op drops an element."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return float(given or 0.0)
    return 0.0
