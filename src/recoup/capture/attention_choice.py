"""Which kernel `scaled_dot_product_attention` takes on a card, by what PyTorch's own choice looks at.

The rules are those of `sdp_utils.cpp`; a test on the stub GPU compares them with `torch._fused_sdp_choice` over cards,
dtypes, masks and head sizes. What the user turned off (`torch.backends.cuda.enable_flash_sdp(False)`) stays off.
"""

from __future__ import annotations

import os
from typing import Literal

import torch

from recoup import _torch

Kernel = Literal["cudnn", "flash", "efficient", "math"]
_HALF = (torch.float16, torch.bfloat16)
_LARGEST_CUDNN_SIZE = 65535  # of batch and heads: a CUDA grid's second and third dimension


def attention_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    dropout: float,
    causal: bool,
    grouped: bool,
    capability: tuple[int, int],
) -> Kernel:
    """Returns the kernel that a card of this compute capability takes.

    Args:
        query, key, value: shape (batch, heads, length, width).
        grouped: fewer heads in key and value than in query are allowed (`enable_gqa`).
    """
    if any(t.dim() != 4 for t in (query, key, value)) or 0 in (query.shape[2], key.shape[2]):
        return "math"
    checks = {"cudnn": _is_for_cudnn, "flash": _is_for_flash, "efficient": _is_for_efficient}
    enabled = _torch.enabled_attention()
    for name in _order(capability):
        if (
            name in enabled
            and _heads_fit(query, key, value, grouped=grouped, same=name != "cudnn")
            and checks[name](query, key, value, mask, dropout, causal, capability)
        ):
            return name
    return "math"


def _order(capability: tuple[int, int]) -> tuple[Kernel, ...]:
    """Returns the kernels in the order they are tried: cuDNN first on Hopper and data-center Blackwell, else last."""
    if capability[0] in (9, 10) and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1":
        return "cudnn", "flash", "efficient"
    return "flash", "efficient"


def _heads_fit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, grouped: bool, same: bool) -> bool:
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    heads, keys, values = query.shape[1], key.shape[1], value.shape[1]
    if not grouped:
        return bool(heads == keys == values)
    return bool(keys and values and heads % keys == 0 and heads % values == 0 and (keys == values or not same))


def _needs_grad(*tensors: torch.Tensor) -> bool:
    return any(t.requires_grad for t in tensors)


def _is_dense(*tensors: torch.Tensor) -> bool:
    """Whether the last dimension lies without gaps."""
    return all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in tensors)


def _is_for_cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    capability: tuple[int, int],
) -> bool:
    widths = (query.shape[3], value.shape[3])
    widest = 256 if capability == (9, 0) else 128
    return (
        capability >= (8, 0)
        and query.dtype in _HALF
        and query.dtype == key.dtype == value.dtype
        and not (torch.are_deterministic_algorithms_enabled() and not _torch.deterministic_warns_only())
        and all(width <= widest and width % 8 == 0 for width in widths)
        and max(query.shape[:2]) <= _LARGEST_CUDNN_SIZE
        and key.shape[2] != 1
        and not (dropout and query.shape[2] == 1)
        and not (causal and mask is not None)
        and _is_dense(query, key, value)
    )


def _is_for_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    capability: tuple[int, int],
) -> bool:
    width = query.shape[3]
    small_memory = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    if small_memory and _needs_grad(query, key, value) and not (width <= 192 or (not dropout and width > 224)):
        return False
    return (
        capability >= (8, 0)
        and mask is None
        and query.dtype in _HALF
        and query.dtype == key.dtype == value.dtype
        and width == key.shape[3] == value.shape[3]
        and width <= 256
        and not (causal and query.shape[2] != key.shape[2])
        and _is_dense(query, key, value)
    )


def _is_for_efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    capability: tuple[int, int],
) -> bool:
    is_half = query.dtype in _HALF
    dtypes = (*_HALF, torch.float32) if capability >= (8, 0) else (torch.float16, torch.float32)
    alignment = 4 if capability >= (8, 0) else 1
    if capability >= (8, 0) or (capability >= (7, 0) and is_half):
        alignment = max(alignment, 8 if is_half else 4)
    return (
        query.dtype in dtypes
        and query.dtype == key.dtype == value.dtype
        and query.shape[1] == key.shape[1]  # torch 2.11 has no grouped heads here
        and query.shape[3] == key.shape[3]
        and all(t.shape[3] > 0 and t.shape[3] % alignment == 0 for t in (query, value))
        and all(t.stride(-1) == 1 for t in (query, key, value))
        and not (causal and mask is not None)
    )
