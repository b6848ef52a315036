"""Cross entropy of a linear head over tiles of tokens: all the logits are never there at once.

In a language model the logits and what the loss makes of them are most of the peak. Here a tile's logits are computed,
turned into the tile's loss and gradients where they lie, and let go. Gradients taken in the forward: Liger kernels
(arXiv 2410.10989) do it for one loss on a GPU; this is the same arithmetic for eager PyTorch on any device.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from recoup.errors import UsageError
from recoup.runtime.tile.loss.function import tiled_loss
from recoup.runtime.tile.loss.math import LossSpec, Step
from recoup.units import parse_bytes

_WHERE = "recoup.runtime.tile.loss.cross_entropy"
_SMALLEST_TILE_BYTES = parse_bytes("32MiB")
_INTEGER = (torch.int64, torch.int32, torch.int16, torch.uint8)


def tiled_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    shift: bool = False,
    tile_tokens: int | None = None,
    num_tiles: int | None = None,
) -> torch.Tensor:
    """Returns `cross_entropy(hidden @ weight.T + bias, labels)` without ever holding all logits.

    For "mean" and "sum" the gradients are taken in the forward, one matmul each for logits, hidden and weight, and
    scaled in backward: no more FLOPs than the plain loss. For "none" (and in float16) backward makes the logits of each
    tile again: one matmul more. Gradients differ from the plain loss by rounding: sums over tiles are taken in another
    order. A second derivative raises.

    Args:
        hidden: (..., H), floating. weight: (V, H), the same dtype; frozen (`requires_grad=False`) it gets no gradient
            and no matmul for one. bias: (V,).
        labels: (...), integers in [0, V) or `ignore_index`.
        reduction: "mean" over the labels that count, "sum", or "none" (a loss a token, in the labels' shape).
        label_smoothing: share of the target spread over all classes, in [0, 1]. z_loss: weight of logsumexp squared,
            reduced as the loss is (PaLM, arXiv 2204.02311).
        logit_scale: multiplies the logits. softcap: then `softcap * tanh(logits / softcap)` (Gemma 2, arXiv
            2408.00118).
        shift: token i is scored against label i + 1 of its row, the last one against nothing.
        tile_tokens, num_tiles: the size or the number of tiles, one of them; left out: tiles whose logits take as many
            bytes as `hidden`, at least 32 MiB.

    Returns:
        The loss in float32 (float64 for float64 input).

    Raises:
        UsageError: if shapes, dtypes or options do not go together. Labels out of range raise what `gather` raises.

    Example:
        >>> hidden, weight = torch.randn(8, 128, 64, requires_grad=True), torch.randn(1000, 64)
        >>> recoup.tiled_cross_entropy(hidden, weight, torch.randint(0, 1000, (8, 128)), num_tiles=4).backward()
    """
    steps: list[Step] = []
    if logit_scale is not None:
        steps.append(("mul", float(logit_scale)))
    if softcap is not None:
        _check(softcap > 0, f"softcap must be positive; got {softcap}")
        steps += [("div", float(softcap)), ("tanh", None), ("mul", float(softcap))]
    _check_tensors(hidden, weight, bias, labels)
    _check(reduction in ("mean", "sum", "none"), f"reduction must be mean, sum or none; got {reduction!r}")
    _check(0.0 <= label_smoothing <= 1.0, f"label_smoothing must be in [0, 1]; got {label_smoothing}")
    _check(tile_tokens is None or num_tiles is None, "give tile_tokens or num_tiles, not both")
    if shift:
        _check(labels.dim() >= 1, "shift needs labels with a dimension of tokens")
        labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    flat = hidden.reshape(-1, hidden.shape[-1])
    if num_tiles is not None:
        _check(num_tiles >= 1, f"num_tiles must be at least 1; got {num_tiles}")
        tile_tokens = -(-len(flat) // num_tiles)
    if tile_tokens is None:
        tile_tokens = default_tile_tokens(flat, weight)
    _check(tile_tokens >= 1 or len(flat) == 0, f"tile_tokens must be at least 1; got {tile_tokens}")
    spec = LossSpec(
        steps=tuple(steps),
        ignore_index=ignore_index,
        label_smoothing=float(label_smoothing),
        z_loss=float(z_loss),
        reduction=reduction,
        tile_tokens=max(tile_tokens, 1),
    )
    if torch.is_autocast_enabled(hidden.device.type):
        low = torch.get_autocast_dtype(hidden.device.type)
        flat, weight, bias = flat.to(low), weight.to(low), bias.to(low) if bias is not None else None
    loss = tiled_loss(flat, weight, bias, labels.reshape(-1).to(torch.int64), spec)
    return loss.view(labels.shape) if reduction == "none" else loss


def default_tile_tokens(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> int:
    """Returns how many tokens' logits take as many bytes as the hidden states do, at least 32 MiB."""
    row_bytes = max(weight_VH.shape[0], 1) * max(weight_VH.dtype.itemsize, 4)
    nbytes = max(hidden_NH.numel() * hidden_NH.dtype.itemsize, _SMALLEST_TILE_BYTES)
    return max(1, nbytes // row_bytes)


def _check_tensors(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor) -> None:
    _check(weight.dim() == 2, f"weight must be (V, H); got shape {list(weight.shape)}")
    _check(hidden.is_floating_point(), f"hidden must be floating; got {hidden.dtype}")
    _check(
        hidden.dim() >= 1 and hidden.shape[-1] == weight.shape[1],
        f"the last dimension of hidden {list(hidden.shape)} must be weight's second {list(weight.shape)}",
    )
    _check(
        torch.is_autocast_enabled(hidden.device.type) or hidden.dtype == weight.dtype,
        f"hidden and weight must have one dtype; got {hidden.dtype} and {weight.dtype}",
    )
    _check(labels.dtype in _INTEGER, f"labels must be class indices; got {labels.dtype}")
    _check(
        labels.shape == hidden.shape[:-1],
        f"labels {list(labels.shape)} must have one entry a token of hidden {list(hidden.shape)}",
    )
    _check(
        bias is None or bias.shape == weight.shape[:1],
        f"bias must be ({weight.shape[0]},); got {list(bias.shape) if bias is not None else None}",
    )


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(f"tiled_cross_entropy: {message}. ({_WHERE})")
