"""CUDA's autocast lists, as kernels for the CPU's autocast.

Which ops autocast knows for a GPU is read off the installed torch (the kernels are registered in every build); what it
does with them is by list: lower precision, float32, float32 by a `dtype` argument, or the widest dtype of the
arguments. The lists differ: on a GPU LayerNorm and softmax run in float32, on a CPU they do not, and cross entropy is
the other way round. Ops that both treat alike keep their own kernels, which share casts of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from recoup import _torch

Kernel = Callable[..., Any]

_LOWER = frozenset({
    "_convolution", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "addbmm",
    "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "cudnn_convolution",
    "cudnn_convolution_transpose", "einsum", "gru_cell", "linalg_multi_dot", "linalg_vecdot", "linear", "lstm_cell",
    "matmul", "mm", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell", "scaled_dot_product_attention",
})  # fmt: skip
_BY_DTYPE = frozenset({
    "cumprod", "cumsum", "linalg_matrix_norm", "linalg_vector_norm", "log_softmax", "prod", "softmax", "sum",
})  # fmt: skip
_WIDEST = frozenset({
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add",
    "tensordot", "vdot",
})  # fmt: skip
# The CPU runs them in float32; a GPU in what they are given.
_FLOAT32_ON_CPU_ALONE = frozenset({
    "adaptive_avg_pool3d", "adaptive_max_pool3d", "avg_pool3d", "cross_entropy_loss", "ctc_loss", "max_pool3d",
    "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
})  # fmt: skip
_REFUSED = frozenset({"binary_cross_entropy"})


def kernels() -> dict[Any, tuple[Kernel, Kernel]]:
    """Returns, for each op treated differently, what to run under the CPU's autocast instead, and what runs now."""
    on_cuda, on_cpu = _torch.registered("AutocastCUDA"), _torch.registered("AutocastCPU")
    found: dict[Any, tuple[Kernel, Kernel]] = {}
    for name in sorted(on_cuda - on_cpu):
        op = _torch.overload(name)
        if op is not None and _short(name) not in _REFUSED:
            found[op] = (_by_list(op, _short(name)), _as_if_unknown(op))
    for name in sorted(on_cpu - on_cuda):
        if _short(name) in _FLOAT32_ON_CPU_ALONE:
            op = _torch.overload(name)
            if op is not None:
                found[op] = (_as_if_unknown(op), _cast(op, lambda args: torch.float32))
    return found


def _short(name: str) -> str:
    return name.removeprefix("aten::").split(".")[0]


def _by_list(op: Any, short: str) -> Kernel:
    if short in _LOWER:
        return _cast(op, lambda args: torch.get_autocast_dtype("cpu"))
    if short in _BY_DTYPE:
        return _with_dtype(op)
    if short in _WIDEST:
        return _cast(op, _widest)
    if short == "norm":
        return _norm
    return _cast(op, lambda args: torch.float32)


def _as_if_unknown(op: Any) -> Kernel:
    """Returns a kernel for an op that autocast does not list: its parts if it is a composite, else the op as it is."""
    if _torch.is_composite(op):
        return _torch.composite(op)  # type: ignore[no-any-return]

    def run(*args: Any, **kwargs: Any) -> Any:
        with _torch.without_cpu_autocast():
            return op(*args, **kwargs)

    return run


def _cast(op: Any, choose: Callable[[Any], torch.dtype]) -> Kernel:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = choose((args, tuple(kwargs.values())))
        with _torch.without_cpu_autocast():
            return op(*_to(args, dtype), **{key: _to((item,), dtype)[0] for key, item in kwargs.items()})

    return run


def _with_dtype(op: Any) -> Kernel:
    arguments = op._schema.arguments
    position = next(i for i, argument in enumerate(arguments) if argument.name == "dtype")
    is_keyword = arguments[position].kwarg_only

    def run(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("dtype") if is_keyword or position >= len(args) else args[position]
        if given is None and _is_eligible(args[0]):
            args, kwargs = args[: position if not is_keyword else None], {**kwargs, "dtype": torch.float32}
        with _torch.without_cpu_autocast():
            return op(*args, **kwargs)

    return run


def _norm(x: torch.Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
    with _torch.without_cpu_autocast():
        if dim is None:
            return torch.ops.aten.norm.ScalarOpt_dtype(x, p, dtype=torch.float32)
        return torch.ops.aten.norm.ScalarOpt_dim_dtype(x, p, dim, keepdim, dtype=torch.float32)


def _is_eligible(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.is_floating_point() and item.dtype != torch.float64


def _to(items: Any, dtype: torch.dtype) -> list[Any]:
    result = []
    for item in items:
        if _is_eligible(item):
            item = item.to(dtype)
        elif isinstance(item, (list, tuple)):
            item = type(item)(_to(item, dtype))
        result.append(item)
    return result


def _widest(items: Any) -> torch.dtype:
    """Returns float32 if a tensor in the nest is in it, else autocast's dtype."""
    for item in items:
        if isinstance(item, torch.Tensor) and item.dtype == torch.float32:
            return torch.float32
        if isinstance(item, (list, tuple)) and _widest(item) == torch.float32:
            return torch.float32
    return torch.get_autocast_dtype("cpu")
