"""Cross entropy of a linear head over tiles of tokens: all the logits are never there at once.

In a language model the logits and what the loss makes of them are most of the peak. Here a tile's logits are computed,
turned into the tile's loss and gradients where they lie, and let go. Gradients taken in the forward: Liger kernels
(arXiv 2410.10989) do it for one loss on a GPU; this is the same arithmetic for eager PyTorch on any device.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch.nn.functional import pad

from recoup.runtime.tile.loss.arguments import HeadOptions, check, head_input
from recoup.runtime.tile.loss.function import tiled_loss
from recoup.runtime.tile.loss.math import LossSpec

_INTEGER = (torch.int64, torch.int32, torch.int16, torch.uint8)


def tiled_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    shift: bool = False,
    **head: Unpack[HeadOptions],
) -> torch.Tensor:
    """Returns `cross_entropy(hidden @ weight.T + bias, labels)` without ever holding all logits.

    For "mean" and "sum" the gradients are taken in the forward, one matmul each for logits, hidden and weight, and
    scaled in backward: no more FLOPs than the plain loss. For "none" (and in float16) backward makes the logits of each
    tile again: one matmul more. Gradients differ from the plain loss by rounding: sums over tiles are taken in another
    order. A second derivative raises.

    Args:
        hidden: (..., H), floating.
        weight: (V, H), the same dtype; frozen (`requires_grad=False`) it gets no gradient and no matmul for one.
        labels: (...), integers in [0, V) or `ignore_index`.
        reduction: "mean" over the labels that count, "sum", or "none" (a loss a token, in the labels' shape).
        label_smoothing: share of the target spread over all classes, in [0, 1].
        z_loss: weight of logsumexp squared, reduced as the loss is (PaLM, arXiv 2204.02311).
        shift: token i is scored against label i + 1 of its row, the last one against nothing.
        **head: bias, logit_scale, softcap, temperature, and the size of a tile; see `HeadOptions`.

    Returns:
        The loss in float32 (float64 for float64 input).

    Raises:
        UsageError: if shapes, dtypes or options do not go together. Labels out of range raise what `gather` raises.

    Example:
        >>> hidden, weight = torch.randn(8, 128, 64, requires_grad=True), torch.randn(1000, 64)
        >>> recoup.tiled_cross_entropy(hidden, weight, torch.randint(0, 1000, (8, 128)), num_tiles=4).backward()
    """
    where = "tiled_cross_entropy"
    check(labels.dtype in _INTEGER, where, f"labels must be class indices; got {labels.dtype}")
    check(
        labels.shape == hidden.shape[:-1],
        where,
        f"labels {list(labels.shape)} must have one entry a token of hidden {list(hidden.shape)}",
    )
    check(reduction in ("mean", "sum", "none"), where, f"reduction must be mean, sum or none; got {reduction!r}")
    check(0.0 <= label_smoothing <= 1.0, where, f"label_smoothing must be in [0, 1]; got {label_smoothing}")
    ready = head_input(where, hidden, weight, **head)
    labels = labels.to(torch.int64)  # `ignore_index` may be none of the labels' own dtype
    if shift:
        check(labels.dim() >= 1, where, "shift needs labels with a dimension of tokens")
        labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    spec = LossSpec(
        steps=ready.steps,
        ignore_index=ignore_index,
        label_smoothing=float(label_smoothing),
        z_loss=float(z_loss),
        reduction=reduction,
        tile_tokens=ready.tile_tokens,
    )
    loss = tiled_loss(ready.hidden, ready.weight, ready.bias, [labels.reshape(-1)], spec)
    return loss.view(labels.shape) if reduction == "none" else loss
