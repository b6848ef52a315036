"""Which calls from outside a plan by tensor is for, of the model or its parts, and how ops in them are addressed."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch

from recoup.ir.decision import Entry, OpMark
from recoup.ir.trace import Call, MethodCall, TensorSpec, Trace
from recoup.runtime.rebuild.cheap_ops import DETACH, VIEW, OpFacts, op_facts


def planned_entries(trace: Trace) -> list[Call | MethodCall]:
    """Returns the calls from outside of any other for which autograd saves something, in order."""
    saving = {op for storage in trace.storages for op in storage.saved_ops}
    within = {at for method in trace.method_calls for at in range(method.first_op, method.last_op)}
    found: list[Call | MethodCall] = [c for c in trace.calls if c.parent < 0 and c.first_op not in within]
    found = sorted([*found, *trace.method_calls], key=lambda call: call.first_op)
    return [call for call in found if not saving.isdisjoint(range(call.first_op, call.last_op))]


def entries_of(calls: Sequence[Call | MethodCall]) -> tuple[Entry, ...]:
    """Returns the entries of a plan for these calls, each once."""
    found: dict[str, Entry] = {}
    for call in calls:
        entry = _entry(call)
        known = found.setdefault(entry.key, entry)
        found[entry.key] = min(known, entry, key=lambda e: e.input_numel)
    return tuple(found.values())


def _entry(call: Call | MethodCall) -> Entry:
    method = call.method if isinstance(call, MethodCall) else ""
    return Entry(path=call.path, method=method, input_numel=call.input_numel)


def addresses_of(trace: Trace, entries: Sequence[Call | MethodCall]) -> list[OpMark | None]:
    """Returns how the ops up to the last entry's end are addressed, calls counted from the first entry of its kind.

    Each entry counts from its own beginning, and so has the marks of the first of its kind. A method's own code is a
    call of its module. None for ops outside of them and for those without a number, see `reads_numbers`.
    """
    counts: dict[Any, int] = {}
    found: list[OpMark | None] = [None] * entries[-1].last_op
    earlier: dict[str, collections.Counter[str]] = {}
    for entry in entries:
        key, method = _entry(entry).key, entry if isinstance(entry, MethodCall) else None
        if key not in earlier:
            num_before = trace.calls.index(entry) if isinstance(entry, Call) else entry.num_calls_before
            earlier[key] = collections.Counter(call.path for call in trace.calls[:num_before])
            if method is not None:
                earlier[key][method.path] -= 1
        elif method is not None:
            continue
        for at in range(entry.first_op, entry.last_op):
            op = trace.ops[at]
            signature = trace.signatures[op.signature]
            name = signature.name
            facts = facts_of(name)
            is_view = facts is not None and facts.kind == VIEW
            if name == DETACH or is_view or not _reads_numbers(signature.args):
                continue
            place = op.call, entry.first_op if op.call < 0 else 0
            ordinal = counts.get(place, 0)
            counts[place] = ordinal + 1
            path, number = entry.path, 0
            if op.call >= 0:
                call = trace.calls[op.call]
                path, number = call.path, call.index - earlier[key][call.path]
            found[at] = OpMark(path=path, call=number, ordinal=ordinal, op=name, entry=key)
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
