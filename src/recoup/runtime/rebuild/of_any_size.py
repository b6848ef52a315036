"""Which functions come to the same ops whatever the sizes of their tensors, see [Note: dynamic shapes]."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from recoup.runtime.rebuild.again import AGAIN
from recoup.runtime.rebuild.cheap_ops import CHEAP_NAMES
from recoup.runtime.rebuild.derived import BySides, NumberedOp
from recoup.runtime.rebuild.op_forms import OpForm
from recoup.runtime.rebuild.rewriting import Rewriting

_OF_ANY_SIZE = frozenset(
    [
        *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "grid_sampler_2d", "_safe_softmax"),
        *("index", "index_put", "copy", "fill", "zero", "linalg_vector_norm", "nll_loss_forward", "sort", "max"),
        *("im2col", "col2im", "_fft_r2c", "_fft_c2c", "scatter", "_scaled_dot_product_flash_attention_for_cpu"),
    ]
)
"""Beside cheap ops, and those of a function's name: what functions come to whatever the sizes. `torch.cdist` comes to
one of two ops."""
BY_SIZE = frozenset([torch.chain_matmul, torch.linalg.multi_dot, F.multi_head_attention_forward])
"""Functions that choose the order of products, or an attention's kernel, by the sizes."""


_OTHERWISE_NAMED = {
    "truediv": "div",
    "itruediv": "div",
    "imul": "mul",
    "iadd": "add",
    "isub": "sub",
    "rmul": "mul",
    "radd": "add",
    "pad": "constant_pad_nd",
}
"""Ops by functions that have another name."""


def _name_of(overload: Any) -> str:
    name: str = overload._schema.name
    return name.removeprefix("aten::").removesuffix("_")


def is_the_op(func: Any, form: OpForm | NumberedOp) -> bool:
    """Whether a function hands its arguments on to an op as they are."""
    op = form.op.op
    name = getattr(func, "__name__", "").strip("_")
    return isinstance(op, torch._ops.OpOverload) and _OTHERWISE_NAMED.get(name, name) == _name_of(op)


def is_of_any_size(func: Any, form: OpForm | NumberedOp) -> bool:
    """Whether a function comes to an op whatever the sizes of its tensors, or to one that gives the same integers."""
    op = form.op.op
    overload = op.op if isinstance(op, Rewriting | BySides) else op
    if overload in AGAIN.values():
        return True
    if not isinstance(overload, torch._ops.OpOverload):
        return False
    name = _name_of(overload)
    is_exact = not any([dtype.is_floating_point or dtype.is_complex for _, (_, _, _, dtype) in form.bases])
    is_itself = getattr(func, "__name__", "").removesuffix("_") == name
    if not form.geometries and not is_itself and any([type(item) in (int, list, tuple) for item in form.rest]):
        return False  # as large as something that the function was handed
    return is_exact or is_itself or name in _OF_ANY_SIZE or name in CHEAP_NAMES
