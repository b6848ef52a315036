"""The tiled loss in autograd: gradients taken in forward, or in backward where they depend on what comes from above.

*Forward form* (mean and sum): each tile's gradients are taken as soon as its logits are there and scaled in backward by
the one number that comes from above: three matmuls a tile, as many as the plain step runs. *Recompute form* ("none",
and float16, whose gradients must be scaled before they are rounded): backward makes each tile's logits again.

Sums over tiles are taken in float32 where the weight is of lower precision.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from recoup import _torch
from recoup.errors import UsageError
from recoup.runtime.tile.inside import each_tile
from recoup.runtime.tile.loss.math import Spec, Step, Tile, wide

Pair = tuple[torch.Tensor, torch.Tensor]
"""Rows, (N, R), and a weight, (V, R)."""

# Shapes: N tokens, H hidden, V classes, T tokens of a tile, K numbers a token.


def tiled_loss(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    others: Sequence[torch.Tensor],
    spec: Spec,
    more: Sequence[Pair] = (),
) -> torch.Tensor:
    """Returns the loss: a scalar, or (N,) or (N, K) for reduction "none"; in the dtype that it is computed in.

    Args:
        others: what the loss reads beside the logits, none of which gets a gradient; the first `spec.num_cut` have a
            row a token and are cut with them (labels), the others go whole to each tile.
        more: (rows, weight) of products that are added to the head's: of a low-rank adapter, (N, R) and (V, R).
    """
    flat = [*others, *(tensor for pair in more for tensor in pair)]
    if not torch.is_grad_enabled():  # a Function is asked for gradients all the same
        hidden_NH, weight_VH, flat = hidden_NH.detach(), weight_VH.detach(), [tensor.detach() for tensor in flat]
        bias_V = None if bias_V is None else bias_V.detach()
    with torch.autocast(hidden_NH.device.type, enabled=False):
        if spec.reduction != "none" and hidden_NH.dtype != torch.float16:
            return _ForwardGradient.apply(hidden_NH, weight_VH, bias_V, spec, len(others), *flat)  # type: ignore[no-any-return, no-untyped-call]
        each = dataclasses.replace(spec, reduction="none")  # type: ignore[type-var]
        rows_N = _Recomputed.apply(hidden_NH, weight_VH, bias_V, each, len(others), *flat)  # type: ignore[no-untyped-call]
        if spec.reduction == "none":
            return rows_N  # type: ignore[no-any-return, no-untyped-call]
        total: torch.Tensor = rows_N.sum()
        if spec.reduction == "sum":
            return total
        num = spec.counts(others).sum()
        return (total / num.clamp(min=1)).masked_fill(num == 0, math.nan)  # whose gradients are zeros, as in torch


class _Gradients:
    """Sums over tiles of the gradients that somebody needs."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, needs: tuple[bool, bool, bool]) -> None:
        self.any = any(needs)
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self._weight = weight
        self._needs_weight = needs[1]
        self._sum: torch.Tensor | None = None
        self._bias = torch.zeros(weight.shape[0], dtype=wide(weight.dtype), device=weight.device) if needs[2] else None

    def add(self, d_TV: torch.Tensor, hidden_TH: torch.Tensor, start: int) -> None:
        """Adds a tile's share."""
        if self.hidden is not None:
            torch.mm(d_TV, self._weight, out=self.hidden[start : start + len(d_TV)])
        if self._needs_weight:
            if self._sum is None:
                self._sum = torch.mm(d_TV.t(), hidden_TH).to(wide(self._weight.dtype))
            elif self._sum.dtype == d_TV.dtype:
                torch.addmm(self._sum, d_TV.t(), hidden_TH, out=self._sum)
            else:
                self._sum.add_(torch.mm(d_TV.t(), hidden_TH))
        if self._bias is not None:
            self._bias.add_(d_TV.sum(0))

    def finish(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        weight, self._sum = self._sum, None
        if self._needs_weight and weight is None:  # no tokens at all
            weight = torch.zeros_like(self._weight)
        weight = weight.to(self._weight.dtype) if weight is not None else None
        bias = self._bias.to(self._weight.dtype) if self._bias is not None else None
        return self.hidden, weight, bias


def _pairs(more: Sequence[Any]) -> list[Pair]:
    return [(more[i], more[i + 1]) for i in range(0, len(more), 2)]


def _all_gradients(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, more: Sequence[Pair]) -> list[_Gradients]:
    """Returns where the gradients of the head's product, and of those added to it, are gathered."""
    needs = ctx.needs_input_grad
    found = [_Gradients(hidden, weight, (needs[0], needs[1], needs[2]))]
    first = len(needs) - 2 * len(more)
    found += [_Gradients(*pair, (needs[first + 2 * i], needs[first + 2 * i + 1], False)) for i, pair in enumerate(more)]
    return found


def _add(all_gradients: Sequence[_Gradients], rows: Sequence[torch.Tensor], d_TV: torch.Tensor, start: int) -> None:
    for gradients, rows_TR in zip(all_gradients, rows, strict=True):
        if gradients.any:
            gradients.add(d_TV, rows_TR[start : start + len(d_TV)], start)


def _tiles(
    hidden_NH: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    others: Sequence[torch.Tensor],
    spec: Spec,
    more: Sequence[Pair],
    *,
    needs_gradient: bool = True,
) -> Iterator[tuple[int, torch.Tensor, Tile]]:
    for start in each_tile(range(0, len(hidden_NH), spec.tile_tokens)):
        end = start + spec.tile_tokens
        hidden_TH = hidden_NH[start:end]
        output_TV = torch.mm(hidden_TH, weight.t()) if bias is None else torch.addmm(bias, hidden_TH, weight.t())
        for rows_NR, weight_VR in more:
            output_TV.addmm_(rows_NR[start:end], weight_VR.t())
        cut = [other[start:end] if i < spec.num_cut else other for i, other in enumerate(others)]
        tile = spec.tile(output_TV, cut, needs_gradient=needs_gradient)
        del output_TV
        yield start, hidden_TH, tile
        del tile


class _ForwardGradient(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        spec: Spec,
        num_others: int,
        *flat: torch.Tensor,
    ) -> torch.Tensor:
        others, more = flat[:num_others], _pairs(flat[num_others:])
        gradients = _all_gradients(ctx, hidden, weight, more)
        needs_gradient = any(g.any for g in gradients)
        all_rows = [hidden, *(rows for rows, _ in more)]
        dtype = _loss_dtype(hidden.dtype, spec.steps)
        scale = torch.ones((), dtype=dtype, device=hidden.device)
        if spec.reduction == "mean":
            scale = scale / spec.counts(others).sum().clamp(min=1)  # where nothing counts, gradients are zeros
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        for start, _, tile in _tiles(hidden, weight, bias, others, spec, more, needs_gradient=needs_gradient):
            total = total + tile.rows().sum()
            if needs_gradient:
                _add(gradients, all_rows, tile.gradient(scale), start)
            del tile
        ctx.save_for_backward(*_in_order(gradients))
        ctx.num_others = num_others
        return total * scale if spec.reduction == "sum" else total / spec.counts(others).sum()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        _refuse_second_derivative()
        # Nobody else has seen these buffers, and without retain_graph nobody will: they are scaled where they lie.
        in_place = not _torch.backward_keeps_graph()
        scaled = []
        for gradient in ctx.saved_tensors:
            if gradient is not None:
                factor = upstream.to(wide(gradient.dtype))
                gradient = gradient.mul_(factor) if in_place else gradient * factor
            scaled.append(gradient)
        return (*scaled[:3], None, None, *[None] * ctx.num_others, *scaled[3:])


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        spec: Spec,
        num_others: int,
        *flat: torch.Tensor,
    ) -> torch.Tensor:
        others, more = flat[:num_others], _pairs(flat[num_others:])
        ctx.save_for_backward(hidden, weight, bias, *flat)
        ctx.spec, ctx.num_others = spec, num_others
        shape = (len(hidden), spec.num_columns) if spec.num_columns else (len(hidden),)
        rows = torch.zeros(shape, dtype=_loss_dtype(hidden.dtype, spec.steps), device=hidden.device)
        for start, hidden_TH, tile in _tiles(hidden, weight, bias, others, spec, more, needs_gradient=False):
            rows[start : start + len(hidden_TH)] = tile.rows()
            del tile
        return rows

    @staticmethod
    def backward(ctx: Any, upstream_N: torch.Tensor) -> Any:
        _refuse_second_derivative()
        hidden, weight, bias, *flat = ctx.saved_tensors
        others, more = flat[: ctx.num_others], _pairs(flat[ctx.num_others :])
        gradients = _all_gradients(ctx, hidden, weight, more)
        all_rows = [hidden, *(rows for rows, _ in more)]
        with torch.autocast(hidden.device.type, enabled=False):
            for start, hidden_TH, tile in _tiles(hidden, weight, bias, others, ctx.spec, more):
                tile.rows()
                _add(gradients, all_rows, tile.gradient(upstream_N[start : start + len(hidden_TH)]), start)
                del tile
        found = _in_order(gradients)
        return (*found[:3], None, None, *[None] * ctx.num_others, *found[3:])


def _in_order(all_gradients: Sequence[_Gradients]) -> list[torch.Tensor | None]:
    """Returns gradients of hidden states, weight and bias, then of the rows and the weight of each product added."""
    first, *others = (gradients.finish() for gradients in all_gradients)
    return [*first, *(gradient for rows, weight, _ in others for gradient in (rows, weight))]


def _loss_dtype(dtype: torch.dtype, steps: Sequence[Step]) -> torch.dtype:
    for kind, value in steps:
        if kind == "to":
            dtype = value
    return wide(dtype)


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # backward with create_graph=True
        raise UsageError(
            "The tiled loss was asked for gradients that can be differentiated again (create_graph=True); it keeps no "
            "logits to do that with. Use the plain loss there: F.cross_entropy, or a plan without `tile`. "
            "(recoup.runtime.tile.loss.cross_entropy)"
        )
