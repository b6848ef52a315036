"""Which calls from outside a plan by tensor is for, of the model or its parts, and how ops in them are addressed."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch

from recoup.ir.decision import OpMark
from recoup.ir.trace import Call, TensorSpec, Trace
from recoup.runtime.rebuild.cheap_ops import DETACH, VIEW, OpFacts, op_facts


def planned_entries(trace: Trace) -> list[Call]:
    """Returns the calls from outside of any other for which autograd saves something, in order."""
    saving = {op for storage in trace.storages for op in storage.saved_ops}
    outermost = (call for call in trace.calls if call.parent < 0)
    return [call for call in outermost if not saving.isdisjoint(range(call.first_op, call.last_op))]


def addresses_of(trace: Trace, entries: Sequence[Call]) -> list[OpMark | None]:
    """Returns how the ops up to the last entry's end are addressed, calls counted from the first entry of its path.

    Each entry counts from its own beginning, and so has the marks of the first of its path. None for ops outside of
    them and for those without a number, see `reads_numbers`.
    """
    counts: dict[int, int] = {}
    found: list[OpMark | None] = [None] * entries[-1].last_op
    earlier: dict[str, collections.Counter[str]] = {}
    for entry in entries:
        if entry.path not in earlier:
            before = trace.calls[: trace.calls.index(entry)]
            earlier[entry.path] = collections.Counter(call.path for call in before)
    for path, at in ((entry.path, at) for entry in entries for at in range(entry.first_op, entry.last_op)):
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
        number = call.index - earlier[path][call.path]
        found[at] = OpMark(path=call.path, call=number, ordinal=ordinal, op=name, entry=path)
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
