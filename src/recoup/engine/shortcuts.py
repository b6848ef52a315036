"""Rebuilding a result for less than its op cost the first time, bit for bit.

- *In place*: the last reader of a rebuilt intermediate may write over it, which halves the traffic and the transient.
- *BatchNorm from its statistics*: in training the op finds mean and variance and then applies them. The node keeps the
  mean and the reciprocal deviation; on the CPU the second half, which is the op in evaluation, can run alone. Both
  multiply by `reciprocal deviation * weight`, so that product goes in as the weight of a distribution of variance one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recoup.engine.cheap_ops import OpFacts


def call_over(facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], spare: Sequence[Any]) -> Any | None:
    """Runs an elementwise op over one of its arguments, if that is in `spare` and the result will fit it exactly.

    Args:
        facts: of the functional overload.
        spare: tensors that nobody reads after this op.

    Returns:
        The result, or None: nothing was run.
    """
    if facts.over is None or not args or not isinstance(args[0], torch.Tensor):
        return None
    first = args[0]
    other = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else None
    for tensor in args[2:]:
        if isinstance(tensor, torch.Tensor):
            return None
    if other is not None and not _alike(first, other):
        return None
    if any(first is t for t in spare):
        return facts.over(*args, **kwargs)
    if facts.commutes and other is not None and kwargs.get("alpha", 1) == 1 and any(other is t for t in spare):
        return facts.over(other, first, *args[2:], **kwargs)
    return None


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


def batch_norm_applied(
    args: Sequence[Any], mean: torch.Tensor, reciprocal_deviation: torch.Tensor
) -> torch.Tensor | None:
    """Returns BatchNorm's output in training, from the statistics it left; None if that cannot be had bit for bit.

    Args:
        args: of `native_batch_norm`: input, weight, bias, two unused, training, momentum, eps.
        mean: shape (channels,), as the op returned it. reciprocal_deviation: likewise.
    """
    x, weight, bias = args[:3]
    if x.device.type != "cpu" or any(t is not None and t.dtype != x.dtype for t in (weight, bias, mean)):
        return None
    if x.dtype not in (torch.float32, torch.float64) or not _is_dense(x):
        return None
    scale = reciprocal_deviation if weight is None else reciprocal_deviation * weight
    one = torch.ones_like(mean)
    out: torch.Tensor = torch.ops.aten.native_batch_norm.default(x, scale, bias, mean, one, False, 0.0, 0.0)[0]
    return out


def _is_dense(x: torch.Tensor) -> bool:
    """Whether the kernel folds the statistics into one scale and shift a channel; it does so for these layouts alone."""
    if x.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])
