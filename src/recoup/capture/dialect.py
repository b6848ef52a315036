"""Has fake CPU tensors dispatch the ops that a CUDA card would.

A plan for a card is made on a machine that has none, with a build of torch that may know no CUDA (where a fake tensor
on "cuda" ends the process). The ops a step dispatches depend on the device: fused attention, dropout that keeps a mask
of bytes, cuDNN's batch norm and RNNs, fused RMS norm, autocast's lists. Inside `cuda_dialect` these choices are made
as the card makes them; the ops so issued have fake results and gradients on any build.

It works by kernels of its own at the dispatcher's `AutogradCPU` and `AutocastCPU` keys, taken away at the end. They
see calls from C++ as well as from Python, and autocast's casts come before the choice of a kernel, as on the card. Real
tensors, and other threads, get what they always get. `torch.autocast("cuda")` means the CPU's autocast inside.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from recoup import _torch
from recoup._pytree import iterate_tensors
from recoup.capture.attention_choice import attention_kernel
from recoup.capture.autocast_lists import kernels as autocast_kernels
from recoup.runtime import execution_context

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_RNN_RESERVE = {0: 2, 1: 2, 2: 6, 3: 5}  # values kept a unit and step, by mode; an assumption, cuDNN does not tell
_LARGEST_BATCH = {True: 880801, False: 65535}  # of cuDNN's spatial batch norm, in training and in evaluation
_SMALLEST_NORM_EPS = 1e-5  # cuDNN's; a smaller eps takes the native kernel


@contextlib.contextmanager
def cuda_dialect(capability: tuple[int, int]) -> Iterator[None]:
    """Has this thread's fake CPU tensors dispatch what a card of this compute capability would."""
    above_autograd = {op: _only_here(kernel, _torch.composite(op)) for op, kernel in _kernels(capability).items()}
    above_all = {op: _only_here(kernel, otherwise) for op, (kernel, otherwise) in autocast_kernels().items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_torch.cpu_kernels(above_autograd, key="AutogradCPU"))
        stack.enter_context(_torch.cpu_kernels(above_all, key="AutocastCPU"))
        stack.enter_context(_torch.cuda_autocast_on_cpu())
        stack.enter_context(execution_context.standing_for("cuda"))
        yield


def cuda_results() -> dict[Any, Callable[..., Any]]:
    """Returns fake kernels of ops whose results on a card are not those that fake CPU tensors have."""
    return {
        _aten.native_layer_norm.default: _layer_norm_results,
        _aten._cudnn_rnn.default: _rnn_results,
        _aten._cudnn_rnn_backward.default: _rnn_gradients,
    }


def _layer_norm_results(*args: Any) -> Any:
    out, mean, rstd = _aten.native_layer_norm.default(*args)
    if args[0].dtype in _HALF and mean.dtype != torch.float32:
        mean, rstd = torch.empty_like(mean, dtype=torch.float32), torch.empty_like(rstd, dtype=torch.float32)
    return out, mean, rstd


def _rnn_results(*args: Any) -> Any:
    out, hidden, cell, _, buffer = _aten._cudnn_rnn.default(*args)
    mode, hidden_size, layers, train, bidirectional = args[6], args[7], args[9], args[12], args[13]
    steps = out.numel() // max(out.shape[-1], 1) if train else 0
    reserved = steps * hidden_size * layers * (2 if bidirectional else 1) * _RNN_RESERVE[mode]
    kept = out.new_empty(reserved * out.element_size(), dtype=torch.uint8)
    return out, hidden, cell, kept, out.new_empty(0) if buffer is None else buffer


def _rnn_gradients(x: torch.Tensor, weights: list[torch.Tensor], *args: Any) -> Any:
    hidden, cell, wanted = args[2], args[3], args[-1]
    like = [torch.empty_like(t) if t is not None and w else None for t, w in zip((x, hidden, cell), wanted[:3])]
    flat = x.new_empty(sum(w.numel() for w in weights)) if wanted[3] else None
    found, at = [], 0
    for weight in weights if flat is not None else ():
        assert flat is not None
        found.append(flat[at : at + weight.numel()].view(weight.shape))
        at += weight.numel()
    return (*like, found)


def _only_here(kernel: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `kernel` for fake tensors of this thread and `otherwise` for all else."""
    owner = threading.get_ident()

    def run(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == owner and any(_torch.is_fake(t) for t in iterate_tensors((args, kwargs))):
            return kernel(*args, **kwargs)
        return otherwise(*args, **kwargs)

    return run


def _kernels(capability: tuple[int, int]) -> dict[Any, Callable[..., Any]]:
    """Returns what to run in place of ops that choose by device."""

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _attention(capability, *args, **kwargs)

    found: dict[Any, Callable[..., Any]] = {
        _aten.scaled_dot_product_attention.default: attention,
        _aten.dropout.default: _dropout,
        _aten.batch_norm.default: _batch_norm,
        _aten.rms_norm.default: _rms_norm,
    }
    for op, fused in ((_aten.softmax.int, _aten._softmax), (_aten.log_softmax.int, _aten._log_softmax)):
        found[op] = _softmax(op, fused.default)
    for name, mode in (("rnn_relu", 0), ("rnn_tanh", 1), ("lstm", 2), ("gru", 3)):
        op = getattr(_aten, name)
        found[op.input], found[op.data] = _recurrent(mode), _packed_recurrent(mode)
    return found


def _attention(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    kernel = attention_kernel(
        query,
        key,
        value,
        attn_mask,
        dropout=dropout_p,
        causal=is_causal,
        grouped=enable_gqa,
        capability=capability,
    )
    mask = _additive(attn_mask, query.dtype)
    wanted = any(t.requires_grad for t in (query, key, value)) and torch.is_grad_enabled()
    out: torch.Tensor
    if kernel == "math":
        out = _aten._scaled_dot_product_attention_math.default(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    elif kernel == "cudnn":
        out = _aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, mask, wanted, dropout_p, is_causal, False, scale=scale
        )[0]
    elif kernel == "efficient":
        if mask is not None:
            mask = _aligned(mask, value.shape[-2]).expand(*query.shape[:-1], key.shape[-2])
        out = _aten._scaled_dot_product_efficient_attention.default(
            query, key, value, mask, wanted, dropout_p, is_causal, scale=scale
        )[0]
    else:
        width = query.shape[-1]
        scale = scale if scale is not None else width**-0.5
        query, key, value = (F.pad(t, (0, -width % 8)) if width % 8 else t for t in (query, key, value))
        out = _aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        out = out[..., :width] if width % 8 else out
    return out


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns a mask to be added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    kept = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)
    return torch.where(mask, kept, torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device))


def _aligned(mask: torch.Tensor, length: int) -> torch.Tensor:
    """Returns the mask with rows that begin at multiples of 16 elements' alignment, as the kernel wants them."""
    missing = -length % 8
    return F.pad(mask, (0, missing))[..., :length] if missing and mask.shape[-1] == length else mask


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if train and 0 < p < 1 and x.numel():
        out: torch.Tensor = _aten.native_dropout.default(x, p, True)[0]
        return out
    return _torch.composite(_aten.dropout.default)(x, p, train)  # type: ignore[no-any-return]


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    has_both = running_mean is not None and running_var is not None
    has_neither = running_mean is None and running_var is None
    if (
        cudnn_enabled
        and x.dtype in (torch.float32, torch.float16, torch.float64)
        and weight is not None
        and bias is not None
        and (weight.dtype == torch.float32 if x.dtype == torch.float16 else weight.dtype == x.dtype)
        and (has_both or (has_neither and training))
        and x.dim() >= 3
        and 0 < x.shape[0] <= _LARGEST_BATCH[training]
        and x.numel()
        and eps >= _SMALLEST_NORM_EPS
    ):
        x = x.contiguous(memory_format=_memory_format(x))
        out: torch.Tensor = _aten.cudnn_batch_norm.default(
            x, weight.contiguous(), bias.contiguous(), running_mean, running_var, training, momentum, eps
        )[0]
        return out
    return _torch.composite(_aten.batch_norm.default)(  # type: ignore[no-any-return]
        x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
    )


def _memory_format(x: torch.Tensor) -> torch.memory_format:
    for dims, kind in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=kind) and not x.is_contiguous():
            return kind
    return torch.contiguous_format


def _softmax(op: Any, fused: Any) -> Callable[..., Any]:
    """Returns softmax that reads half precision and writes single precision in one kernel, for float16."""

    def run(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if x.dtype == torch.float16 and dtype == torch.float32:
            return fused(x, dim, True)
        return _torch.composite(op)(x, dim, dtype)

    return run


def _rms_norm(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    if weight is not None and weight.dtype != x.dtype:
        return _torch.composite(_aten.rms_norm.default)(x, shape, weight, eps)  # type: ignore[no-any-return]
    out: torch.Tensor = _RmsNorm.apply(x, tuple(shape), weight, eps)  # type: ignore[no-untyped-call]
    return out


class _RmsNorm(torch.autograd.Function):
    """The fused op and its backward: without a card torch has no gradient for it but that of its parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: Any, weight: torch.Tensor | None, eps: float | None) -> torch.Tensor:
        with _torch.below_autograd():
            out, rstd = _aten._fused_rms_norm.default(x, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(x, rstd, weight)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, rstd, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with _torch.below_autograd():
            dx, dweight = _aten._fused_rms_norm_backward.default(gradients[0], x, ctx.shape, rstd, weight, wanted)
        return dx if wanted[0] else None, None, dweight if wanted[1] else None, None


def _recurrent(mode: int) -> Callable[..., Any]:
    def run(
        x: torch.Tensor,
        state: Any,
        weights: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        shape = (num_layers, batch_first, dropout, train, bidirectional)
        return _cudnn_rnn(mode, x, state, weights, has_biases, *shape, batch_sizes=[])

    return run


def _packed_recurrent(mode: int) -> Callable[..., Any]:
    def run(
        data: torch.Tensor,
        batch_sizes: torch.Tensor,
        state: Any,
        weights: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> Any:
        shape = (num_layers, False, dropout, train, bidirectional)
        return _cudnn_rnn(mode, data, state, weights, has_biases, *shape, batch_sizes=batch_sizes.tolist())

    return run


def _cudnn_rnn(
    mode: int,
    x: torch.Tensor,
    state: Any,
    weights: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    *,
    batch_sizes: list[int],
) -> Any:
    is_lstm = mode == 2
    hidden, cell = state if is_lstm else (state, None)
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        x, hidden, weights = x.to(low), hidden.to(low), [w.to(low) for w in weights]
        cell = None if cell is None else cell.to(low)
    recurrent = weights[1]
    hidden_size = (hidden if cell is None else cell).shape[-1]
    projected = recurrent.shape[1] if is_lstm and recurrent.shape[1] != hidden_size else 0
    each = len(weights) // (num_layers * (2 if bidirectional else 1))
    out, hidden_out, cell_out, *_ = _aten._cudnn_rnn.default(
        x, weights, each, None, hidden, cell, mode, hidden_size, projected, num_layers, batch_first, dropout, train,
        bidirectional, batch_sizes, None,
    )  # fmt: skip
    return (out, hidden_out, cell_out) if is_lstm else (out, hidden_out)
