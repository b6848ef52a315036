"""The tiled loss in autograd: gradients taken in forward, or in backward where they depend on what comes from above.

*Forward form* (mean and sum): each tile's gradients are taken as soon as its logits are there and scaled in backward by
the one number that comes from above: three matmuls a tile, as many as the plain step runs. *Recompute form* ("none",
and float16, whose gradients must be scaled before they are rounded): backward makes each tile's logits again.

Sums over tiles are taken in float32 where the weight is of lower precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from recoup import _compat
from recoup.engine.tile_math import LossSpec, Tile, wide
from recoup.errors import UsageError

# Shapes: N tokens, H hidden, V classes, T tokens of a tile.


def tiled_loss(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    spec: LossSpec,
) -> torch.Tensor:
    """Returns the loss: a scalar, or (N,) for reduction "none"; in the dtype that it is computed in."""
    with torch.autocast(hidden_NH.device.type, enabled=False):
        if spec.reduction != "none" and hidden_NH.dtype != torch.float16:
            return _ForwardGradient.apply(hidden_NH, weight_VH, bias_V, labels_N, spec)  # type: ignore[no-any-return, no-untyped-call]
        each = dataclasses.replace(spec, reduction="none")
        rows_N = _Recomputed.apply(hidden_NH, weight_VH, bias_V, labels_N, each)  # type: ignore[no-untyped-call]
        if spec.reduction == "none":
            return rows_N  # type: ignore[no-any-return, no-untyped-call]
        total = rows_N.sum()
        return total / (labels_N != spec.ignore_index).sum() if spec.reduction == "mean" else total  # type: ignore[no-any-return, no-untyped-call]


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


def _tiles(
    hidden_NH: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels_N: torch.Tensor, spec: LossSpec
) -> Iterator[tuple[int, torch.Tensor, Tile]]:
    for start in range(0, len(hidden_NH), spec.tile_tokens):
        hidden_TH = hidden_NH[start : start + spec.tile_tokens]
        output_TV = torch.mm(hidden_TH, weight.t()) if bias is None else torch.addmm(bias, hidden_TH, weight.t())
        tile = Tile(output_TV, labels_N[start : start + spec.tile_tokens], spec)
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
        labels: torch.Tensor,
        spec: LossSpec,
    ) -> torch.Tensor:
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        gradients = _Gradients(hidden, weight, needs)
        dtype = _loss_dtype(hidden.dtype, spec)
        scale = torch.ones((), dtype=dtype, device=hidden.device)
        if spec.reduction == "mean":
            scale = scale / (labels != spec.ignore_index).sum()
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        for start, hidden_TH, tile in _tiles(hidden, weight, bias, labels, spec):
            total = total + tile.rows().sum()
            if gradients.any:
                gradients.add(tile.gradient(scale), hidden_TH, start)
            del tile
        ctx.save_for_backward(*gradients.finish())
        return total * scale if spec.reduction == "sum" else total / (labels != spec.ignore_index).sum()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        _refuse_second_derivative()
        # Nobody else has seen these buffers, and without retain_graph nobody will: they are scaled where they lie.
        in_place = not _compat.backward_keeps_graph()
        scaled = []
        for gradient in ctx.saved_tensors:
            if gradient is not None:
                factor = upstream.to(wide(gradient.dtype))
                gradient = gradient.mul_(factor) if in_place else gradient * factor
            scaled.append(gradient)
        return (*scaled, None, None)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        spec: LossSpec,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.spec = spec
        rows = torch.zeros(len(hidden), dtype=_loss_dtype(hidden.dtype, spec), device=hidden.device)
        for start, hidden_TH, tile in _tiles(hidden, weight, bias, labels, spec):
            rows[start : start + len(hidden_TH)] = tile.rows()
            del tile
        return rows

    @staticmethod
    def backward(ctx: Any, upstream_N: torch.Tensor) -> Any:
        _refuse_second_derivative()
        hidden, weight, bias, labels = ctx.saved_tensors
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        gradients = _Gradients(hidden, weight, needs)
        with torch.autocast(hidden.device.type, enabled=False):
            for start, hidden_TH, tile in _tiles(hidden, weight, bias, labels, ctx.spec):
                tile.rows()
                gradients.add(tile.gradient(upstream_N[start : start + len(hidden_TH)]), hidden_TH, start)
                del tile
        return (*gradients.finish(), None, None)


def _loss_dtype(dtype: torch.dtype, spec: LossSpec) -> torch.dtype:
    for kind, value in spec.steps:
        if kind == "to":
            dtype = value
    return wide(dtype)


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # backward with create_graph=True
        raise UsageError(
            "The tiled loss was asked for gradients that can be differentiated again (create_graph=True); it keeps no "
            "logits to do that with. Use the plain loss there: F.cross_entropy, or a plan without `tile`. "
            "(recoup.engine.tile)"
        )
