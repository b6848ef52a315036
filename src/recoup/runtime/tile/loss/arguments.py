"""What every loss over tiles is given beside its own arguments: a head and the size of a tile, checked."""

from __future__ import annotations

import dataclasses
from typing import TypedDict

import torch

from recoup.errors import UsageError
from recoup.runtime.tile.loss.math import Step
from recoup.units import parse_bytes

_SMALLEST_TILE_BYTES = parse_bytes("32MiB")


class HeadOptions(TypedDict, total=False):
    """How the logits are made of `hidden @ weight.T`, and in how many tiles.

    Attributes:
        bias: (V,).
        logit_scale: multiplies the logits.
        softcap: then `softcap * tanh(logits / softcap)` (Gemma 2, arXiv 2408.00118).
        temperature: then divides them.
        tile_tokens: tokens of a tile; default: tiles whose logits take as many bytes as `hidden`, at least 32 MiB.
        num_tiles: number of tiles, in place of `tile_tokens`.
    """

    bias: torch.Tensor | None
    logit_scale: float | None
    softcap: float | None
    temperature: float | None
    tile_tokens: int | None
    num_tiles: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadInput:
    """A head's product, ready for tiles. Shapes: N tokens, H hidden, V classes.

    Attributes:
        hidden: (N, H), in the dtype of the product.
        weight: (V, H), in the same dtype.
        bias: (V,) in the same dtype, or None.
        steps: ops from the product to the logits.
        tile_tokens: rows of a tile.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    steps: tuple[Step, ...]
    tile_tokens: int


def check(holds: bool, where: str, message: str) -> None:
    """Raises a UsageError that names the function unless a condition holds."""
    if not holds:
        raise UsageError(f"{where}: {message}. (recoup.runtime.tile.loss)")


def head_input(
    where: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    temperature: float | None = None,
    tile_tokens: int | None = None,
    num_tiles: int | None = None,
) -> HeadInput:
    """Returns a head's product as tiles need it.

    Args:
        where: the public function, for messages. Others: see `HeadOptions`.

    Raises:
        UsageError: if shapes, dtypes or options do not go together.
    """
    steps: list[Step] = []
    if logit_scale is not None:
        steps.append(("mul", float(logit_scale)))
    if softcap is not None:
        check(softcap > 0, where, f"softcap must be positive; got {softcap}")
        steps += [("div", float(softcap)), ("tanh", None), ("mul", float(softcap))]
    if temperature is not None:
        check(temperature > 0, where, f"temperature must be positive; got {temperature}")
        steps.append(("div", float(temperature)))
    check_product(where, hidden, weight, bias)
    check(tile_tokens is None or num_tiles is None, where, "give tile_tokens or num_tiles, not both")
    flat = hidden.reshape(-1, hidden.shape[-1])
    if num_tiles is not None:
        check(num_tiles >= 1, where, f"num_tiles must be at least 1; got {num_tiles}")
        tile_tokens = -(-len(flat) // num_tiles)
    if tile_tokens is None:
        tile_tokens = default_tile_tokens(flat, weight)
    check(tile_tokens >= 1 or len(flat) == 0, where, f"tile_tokens must be at least 1; got {tile_tokens}")
    if torch.is_autocast_enabled(hidden.device.type):
        low = torch.get_autocast_dtype(hidden.device.type)
        flat, weight, bias = flat.to(low), weight.to(low), bias.to(low) if bias is not None else None
    return HeadInput(hidden=flat, weight=weight, bias=bias, steps=tuple(steps), tile_tokens=max(tile_tokens, 1))


def check_product(where: str, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises UsageError unless `hidden @ weight.T + bias` is a product of tokens and classes."""
    check(weight.dim() == 2, where, f"weight must be (V, H); got shape {list(weight.shape)}")
    check(hidden.is_floating_point(), where, f"hidden must be floating; got {hidden.dtype}")
    check(
        hidden.dim() >= 1 and hidden.shape[-1] == weight.shape[1],
        where,
        f"the last dimension of hidden {list(hidden.shape)} must be weight's second {list(weight.shape)}",
    )
    check(
        torch.is_autocast_enabled(hidden.device.type) or hidden.dtype == weight.dtype,
        where,
        f"hidden and weight must have one dtype; got {hidden.dtype} and {weight.dtype}",
    )
    shape = list(bias.shape) if bias is not None else None
    check(shape in (None, [weight.shape[0]]), where, f"bias must be ({weight.shape[0]},); got {shape}")


def default_tile_tokens(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> int:
    """Returns how many tokens' logits take as many bytes as the hidden states do, at least 32 MiB."""
    row_bytes = max(weight_VH.shape[0], 1) * max(weight_VH.dtype.itemsize, 4)
    nbytes = max(hidden_NH.numel() * hidden_NH.dtype.itemsize, _SMALLEST_TILE_BYTES)
    return max(1, nbytes // row_bytes)
