"""Which kernel `scaled_dot_product_attention` takes on a card, by what PyTorch's own choice looks at.

The rules are those of `sdp_utils.cpp`; a test on the stub GPU compares them with `torch._fused_sdp_choice` over cards,
dtypes, masks and head sizes. What the user turned off (`torch.backends.cuda.enable_flash_sdp(False)`) stays off.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

import torch

from recoup import _torch

Kernel = Literal["cudnn", "flash", "efficient", "math"]
_HALF = (torch.float16, torch.bfloat16)
_LARGEST_CUDNN_SIZE = 65535  # of batch and heads: a CUDA grid's second and third dimension


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of one call, and the card's compute capability."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    capability: tuple[int, int]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    def has_dtype(self, *dtypes: torch.dtype) -> bool:
        """Whether query, key and value are of one of these dtypes, the same."""
        return self.query.dtype in dtypes and self.query.dtype == self.key.dtype == self.value.dtype

    def is_dense(self) -> bool:
        """Whether the last dimensions lie without gaps; of size 1 they always do."""
        return all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in self.tensors)


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
    call = _Call(query, key, value, mask, dropout, causal, capability)
    for name in _order(capability):
        if (
            name in enabled
            and _heads_fit(query, key, value, grouped=grouped, same=name != "cudnn")
            and checks[name](call)
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


def _is_for_cudnn(call: _Call) -> bool:
    widths = (call.query.shape[3], call.value.shape[3])
    widest = 256 if call.capability == (9, 0) else 128
    return (
        call.capability >= (8, 0)
        and call.has_dtype(*_HALF)
        and not (torch.are_deterministic_algorithms_enabled() and not _torch.deterministic_warns_only())
        and all(width <= widest and width % 8 == 0 for width in widths)
        and max(call.query.shape[:2]) <= _LARGEST_CUDNN_SIZE
        and call.key.shape[2] != 1
        and not (call.dropout and call.query.shape[2] == 1)
        and not (call.causal and call.mask is not None)
        and call.is_dense()
    )


def _is_for_flash(call: _Call) -> bool:
    width = call.query.shape[3]
    small_memory = (8, 6) <= call.capability <= (8, 9) or call.capability >= (12, 0)
    if (
        small_memory
        and any(t.requires_grad for t in call.tensors)
        and not (width <= 192 or (not call.dropout and width > 224))
    ):
        return False
    return (
        call.capability >= (8, 0)
        and call.mask is None
        and call.has_dtype(*_HALF)
        and width == call.key.shape[3] == call.value.shape[3]
        and width <= 256
        and not (call.causal and call.query.shape[2] != call.key.shape[2])
        and call.is_dense()
    )


def _is_for_efficient(call: _Call) -> bool:
    is_half = call.query.dtype in _HALF
    dtypes = (*_HALF, torch.float32) if call.capability >= (8, 0) else (torch.float16, torch.float32)
    alignment = 4 if call.capability >= (8, 0) else 1
    if call.capability >= (8, 0) or (call.capability >= (7, 0) and is_half):
        alignment = max(alignment, 8 if is_half else 4)
    return (
        call.has_dtype(*dtypes)
        and call.query.shape[1] == call.key.shape[1]  # torch 2.11 has no grouped heads here
        and call.query.shape[3] == call.key.shape[3]
        and all(t.shape[3] > 0 and t.shape[3] % alignment == 0 for t in (call.query, call.value))
        and all(t.stride(-1) == 1 for t in call.tensors)
        and not (call.causal and call.mask is not None)
    )
