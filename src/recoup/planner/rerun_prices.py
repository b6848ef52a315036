"""What ops take that run again as other ops: BatchNorm from its statistics, a softmax of which few rows are masked.

And what a random mask takes that is held as bytes. How they run is in `runtime/rebuild/batch_norm.py`, `again.py` and
`kept.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from recoup.cost.model import CostModel
from recoup.cost.signature import make_signature
from recoup.ir.trace import Op, Signature, TensorSpec, Trace
from recoup.runtime.rebuild.cheap_ops import op_facts
from recoup.runtime.rebuild.shortcuts import can_apply_statistics

_aten = torch.ops.aten


def rerun_seconds(trace: Trace, cost: CostModel) -> dict[int, float]:
    """Returns the seconds of such ops where they run again, by signature."""
    if trace.device != "cpu":
        return {}
    again = {i: found for i, s in enumerate(trace.signatures) if (found := _applied(s) or _softmax(s)) is not None}
    return dict(zip(again, _seconds(trace, cost, tuple(again.values())), strict=True))


def mask_seconds(trace: Trace, cost: CostModel) -> dict[int, float]:
    """Returns the seconds of making bytes of a random mask and the mask of them, by signature of what draws it."""
    drawn = {i: found for i, s in enumerate(trace.signatures) if (found := _copies(s))}
    flat = _seconds(trace, cost, [copy for copies in drawn.values() for copy in copies])
    return {i: there + back for i, there, back in zip(drawn, flat[::2], flat[1::2], strict=True)}


def _seconds(trace: Trace, cost: CostModel, signatures: Sequence[Signature]) -> Sequence[float]:
    """Returns the seconds of ops on the device of a trace."""
    if not signatures:
        return ()
    ops = tuple(
        Op(signature=i, call=-1, origin=-1, phase="backward", replayed=True, inputs=(), outputs=())
        for i in range(len(signatures))
    )
    alone = dataclasses.replace(
        trace, signatures=tuple(signatures), ops=ops, storages=(), calls=(), rederive_links=(), copies=()
    )
    return cost.price(alone).op_seconds


def _copies(signature: Signature) -> tuple[Signature, ...]:
    """Returns the copies of a random mask, to bytes and back; none for other ops."""
    name, _, overload = signature.name.removeprefix("aten.").partition(".")
    found = getattr(getattr(_aten, name, None), overload, None)
    mask = _meta(signature.args[0]) if signature.args else None
    if found is None or mask is None or not op_facts(found).is_random_mask:
        return ()
    there = make_signature(_aten.to.dtype, (mask, torch.bool), {}, mask.to(torch.bool))
    return there, make_signature(_aten.copy_.default, (mask, mask.to(torch.uint8)), {}, mask)


def _applied(signature: Signature) -> Signature | None:
    """Returns the op that applies a BatchNorm's statistics; None for any other op, and where that is not the same."""
    name = signature.name.partition(".")[2].partition(".")[0]
    packet = getattr(_aten, name, None) if "batch_norm" in name else None
    overload = getattr(packet, signature.name.rpartition(".")[2], None)
    if overload is None or not op_facts(overload).updates(signature.args):
        return None
    x, weight, bias = (_meta(a) for a in signature.args[:3])
    if x is None:
        return None
    mean = torch.empty(x.shape[1], dtype=torch.float32 if x.dtype != torch.float64 else x.dtype, device="meta")
    if not can_apply_statistics((x, weight, bias), mean, device_type="cpu"):
        return None
    args = (x, mean if weight is None else weight, bias, mean, mean, False, 0.0, 0.0)
    return make_signature(_aten.native_batch_norm.default, args, {}, (torch.empty_like(x), mean[:0], mean[:0]))


def _softmax(signature: Signature) -> Signature | None:
    if signature.name != "aten._safe_softmax.default" or len(signature.args) > 2 or signature.kwargs:
        return None
    x, dim = signature.args
    made_up = _meta(x)
    return None if made_up is None else make_signature(_aten._softmax.default, (made_up, dim, False), {}, made_up)


def _meta(spec: object) -> torch.Tensor | None:
    if not isinstance(spec, TensorSpec) or len(spec.stride) != len(spec.shape):  # the latter: of a sparse tensor
        return None
    return torch.empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype), device="meta")
