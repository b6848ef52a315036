"""BatchNorm's result from the statistics that its kernel leaves, for plans by tensor (`shortcuts.batch_norm_applied`).

Finding the statistics is most of the op, and autograd keeps them for its backward. So its result is noted as made from
these, by the ops of `batch_norm_applied`, in the place of what really made it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from recoup.runtime.rebuild.cheap_ops import op_facts
from recoup.runtime.rebuild.op_forms import OpForm, form_of
from recoup.runtime.rebuild.shortcuts import can_apply_statistics
from recoup.runtime.rebuild.values import Made, Value, geometry_of

_aten = torch.ops.aten
APPLY, SCALE, ONE = (
    op_facts(_aten.native_batch_norm.default),
    op_facts(_aten.mul.Tensor),
    op_facts(_aten.ones_like.default),
)


@dataclasses.dataclass(slots=True)
class Applied:
    """How a result is made from statistics.

    Attributes:
        statistics: their values. ops: form, record and value of each op, the result's last.
    """

    statistics: list[Value]
    ops: list[tuple[OpForm | None, Made, Value]]


def note_applied(recorder: Any, args: tuple[Any, ...], out: Any) -> Applied | None:
    """Notes in a recorder how a BatchNorm's result is made from its statistics; returns that, None if it is not.

    Args:
        args: of the op in training. out: what it returned.
    """
    x, weight, bias = args[:3]
    # Autograd keeps the statistics if it keeps anything.
    is_saved = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    if not is_saved or not can_apply_statistics(args, out[1]):
        return None
    result, mean, deviation = out
    applied = Applied([], [])
    for tensor in (mean, deviation):
        value = Value()
        value.base = geometry_of(tensor)
        recorder.set_value(tensor, value)
        applied.statistics.append(value)

    def note(facts: Any, arguments: tuple[Any, ...], like: torch.Tensor, stand_ins: dict[int, Value]) -> Value | None:
        """Notes one op; `stand_ins`: values that are read in the place of some of its tensors, by place."""
        made = recorder._made(facts, arguments, {})
        if made is None:
            return None
        for place, value in stand_ins.items():
            made.reads[place].value = value
        made.values = tuple([read.value for read in made.reads])
        value = Value()
        value.made, value.base = made, geometry_of(like)
        made.written.append(value.base)
        outs = out if like is result else like
        applied.ops.append((form_of(facts, arguments, {}, outs, [(0, like)]), made, value))
        return value

    stand_ins = {}
    if weight is not None:
        stand_ins[1] = note(SCALE, (deviation, weight), deviation, {})
    stand_ins[-1] = note(ONE, (mean,), mean, {})
    known = {place: value for place, value in stand_ins.items() if value is not None}
    if len(known) < len(stand_ins):
        return None
    arguments = (x, deviation, bias, mean, mean, False, 0.0, 0.0)  # of the scale and one only how they lie counts
    made = note(APPLY, arguments, result, known)
    if made is None:
        return None
    recorder.set_value(result, made)
    return applied
