"""Which forwards of the model a plan by tensor is for, and how ops in them are addressed."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch

from recoup.ir.decision import OpMark
from recoup.ir.trace import Call, TensorSpec, Trace
from recoup.runtime.rebuild.cheap_ops import DETACH, VIEW, OpFacts, op_facts


def planned_forwards(trace: Trace) -> list[Call]:
    """Returns the calls of the model for which autograd saves something, in order."""
    saving = {op for storage in trace.storages for op in storage.saved_ops}
    return [call for call in trace.calls if not call.path and not saving.isdisjoint(range(call.first_op, call.last_op))]


def addresses_of(trace: Trace, forwards: Sequence[Call]) -> list[OpMark | None]:
    """Returns how the ops up to the last of the model's forwards are addressed, calls counted from the first of these.

    Each forward counts from its own beginning, and so has the marks of the first. None for ops outside of them and for
    those without a number, see `reads_numbers`.
    """
    earlier = collections.Counter(call.path for call in trace.calls[: trace.calls.index(forwards[0])])
    counts: dict[int, int] = {}
    found: list[OpMark | None] = [None] * forwards[-1].last_op
    for at in (at for forward in forwards for at in range(forward.first_op, forward.last_op)):
        op = trace.ops[at]
        signature = trace.signatures[op.signature]
        name = signature.name
        facts = facts_of(name)
        is_view = facts is not None and facts.kind == VIEW
        if name == DETACH or is_view or not _reads_numbers(signature.args):
            continue
        ordinal = counts.get(op.call, 0)
        counts[op.call] = ordinal + 1
        call = trace.calls[op.call]
        found[at] = OpMark(path=call.path, call=call.index - earlier[call.path], ordinal=ordinal, op=name)
    return found


def facts_of(name: str) -> OpFacts | None:
    """Returns the facts about an overload by its name, "aten.mm.default"."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
    return op_facts(found) if found is not None else None


def _reads_numbers(args: Sequence[Any]) -> bool:
    """Whether an op is handed a tensor of floating-point or complex numbers."""
    for item in args:
        if isinstance(item, TensorSpec):
            dtype = getattr(torch, item.dtype.removeprefix("torch."))
            if dtype.is_floating_point or dtype.is_complex:
                return True
        elif isinstance(item, (list, tuple)) and _reads_numbers(item):
            return True
    return False
