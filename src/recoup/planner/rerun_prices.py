"""What ops take that run again as other ops: BatchNorm from its statistics, a softmax of which few rows are masked.

And what a random mask takes that is held as bytes. How they run is in `runtime/rebuild/batch_norm.py`, `again.py` and
`kept.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from recoup.cost.model import CostModel
from recoup.cost.signature import make_signature
from recoup.ir.trace import Op, Signature, TensorSpec, Trace
from recoup.runtime.rebuild.cheap_ops import op_facts
from recoup.runtime.rebuild.shortcuts import can_apply_statistics

_aten = torch.ops.aten


class RerunPrices(NamedTuple):
    """Seconds of ops, by the signature of what they run instead of.

    `rerun_seconds` of ops that run again as another one, `mask_seconds` of making bytes of a random mask and the mask
    of them.
    """

    rerun_seconds: Mapping[int, float]
    mask_seconds: Mapping[int, float]


def rerun_prices(trace: Trace, cost: CostModel) -> RerunPrices:
    """Returns what such ops of a step take, all measured at once."""
    again: dict[int, tuple[Signature, ...]] = {}
    copies: dict[int, tuple[Signature, ...]] = {}
    for index, signature in enumerate(trace.signatures):
        if trace.device == "cpu" and (found := _applied(signature) or _softmax(signature)) is not None:
            again[index] = (found,)
        elif of_mask := _copies(signature):
            copies[index] = of_mask
    seconds = _seconds(trace, cost, again | copies)
    return RerunPrices(*({i: seconds[i] for i in kind} for kind in (again, copies)))


def _seconds(trace: Trace, cost: CostModel, instead: Mapping[int, Sequence[Signature]]) -> dict[int, float]:
    """Returns the seconds of what runs instead of ops, by their signature, priced for as many as the step has."""
    if not instead:
        return {}
    first = dict(zip(instead, itertools.accumulate(map(len, instead.values()), initial=0), strict=False))
    origins = [op.signature for op in trace.ops if op.signature in instead]
    ops = tuple(
        Op(signature=first[i] + n, call=-1, origin=-1, phase="backward", replayed=True, inputs=(), outputs=())
        for i in origins
        for n in range(len(instead[i]))
    )
    alone = dataclasses.replace(
        trace,
        signatures=tuple(itertools.chain.from_iterable(instead.values())),
        ops=ops,
        storages=(),
        calls=(),
        rederive_links=(),
        copies=(),
    )
    seconds = {op.signature: taken for op, taken in zip(ops, cost.price(alone).op_seconds, strict=True)}
    return {i: sum(seconds[first[i] + n] for n in range(len(found))) for i, found in instead.items()}


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
