"""The module tree with what each call keeps, with and without a plan, and what that takes; no torch, nothing run."""

from __future__ import annotations

from collections.abc import Sequence

from recoup.analysis.timeline import find_peak
from recoup.cost.model import PricedTrace
from recoup.ir.decision import Decision, Recompute, Region, Scan
from recoup.ir.report import ModuleRow
from recoup.ir.trace import Trace

_NOBODY = ("", -1)  # the loss outside the model


def module_rows(
    plain: PricedTrace,
    planned: PricedTrace | None,
    decisions: Sequence[Decision],
    *,
    fixed_bytes: tuple[int, ...] = (0, 0),
) -> tuple[ModuleRow, ...]:
    """Returns the module tree with what each call keeps, with and without the plan, and what that costs.

    A storage counts for the first call that saves it, at the peak else for the call that made it; a parameter and its
    gradient for the module that has it. What belongs to no call (the loss, the batch, the optimizer's state,
    `fixed_bytes` of the device without and with the plan) is one row more: so the bytes at the peak add up to the peak.
    A second run counts for the region that runs (a span's for its first call), a rederived tensor for the call that
    needed it.
    """
    trace = plain.trace
    num = len(trace.calls)
    before = _held(trace)
    after = _held(planned.trace) if planned is not None else before
    extra = _extra_seconds(trace, planned, decisions) if planned is not None else [0.0] * num
    forward = [0.0] * num
    for i, op in enumerate(trace.ops):
        if op.call >= 0 and op.phase == "forward":
            forward[op.call] += plain.op_seconds[i]
    saved = trace.with_children([before.get((c.path, c.index), 0) for c in trace.calls])
    kept = trace.with_children([after.get((c.path, c.index), 0) for c in trace.calls])
    extra, forward = trace.with_children(extra), trace.with_children(forward)
    plain_peak = _alive_at_peak(plain, None, fixed_bytes[0])
    peak = _alive_at_peak(planned, plain, fixed_bytes[1]) if planned is not None else plain_peak
    by_call = [
        trace.with_children([found.get((c.path, c.index), 0) for c in trace.calls]) for found in (plain_peak, peak)
    ]
    depth = trace.depths()
    actions = _actions(trace, decisions)
    rows = tuple(
        ModuleRow(
            path=call.path,
            call=call.index,
            kind=call.kind,
            depth=depth[i],
            action=actions[i][0],
            is_decided=actions[i][1],
            plain_saved_bytes=saved[i],
            saved_bytes=kept[i],
            plain_peak_bytes=by_call[0][i],
            peak_bytes=by_call[1][i],
            extra_seconds=extra[i],
            forward_seconds=forward[i],
        )
        for i, call in enumerate(trace.calls)
    )
    in_calls = {(c.path, c.index) for c in trace.calls}
    rest = [sum(size for key, size in found.items() if key not in in_calls) for found in (plain_peak, peak)]
    outside = ModuleRow(
        path="(outside)",
        call=0,
        kind="loss, batch, optimizer",
        depth=0,
        action="save",
        is_decided=False,
        plain_saved_bytes=before.get(_NOBODY, 0),
        saved_bytes=after.get(_NOBODY, 0),
        plain_peak_bytes=rest[0],
        peak_bytes=rest[1],
        extra_seconds=0.0,
        forward_seconds=sum(s for s, o in zip(plain.op_seconds, trace.ops, strict=True) if o.phase == "loss"),
    )
    return (*rows, outside)


def _held(trace: Trace) -> dict[tuple[str, int], int]:
    """Returns bytes held when backward begins, by the call that first saves them."""
    held: dict[tuple[str, int], int] = {}
    for storage in trace.held_storages():
        owner = storage.saved_by[0] if storage.saved_by else -1
        key = (trace.calls[owner].path, trace.calls[owner].index) if owner >= 0 else _NOBODY
        held[key] = held.get(key, 0) + storage.nbytes
    return held


def _alive_at_peak(priced: PricedTrace, plain: PricedTrace | None, fixed_bytes: int) -> dict[tuple[str, int], int]:
    """Returns bytes alive at the step's peak, by the call they belong to."""
    priced, peak = find_peak(priced, plain)
    trace = priced.trace
    paths = {call.path for call in trace.calls}
    alive = {_NOBODY: fixed_bytes}

    def key_of(index: int) -> tuple[str, int]:
        return (trace.calls[index].path, trace.calls[index].index) if index >= 0 else _NOBODY

    for storage in trace.storages:
        if not storage.alloc_op <= peak <= storage.free_op:
            continue
        if storage.alloc_op >= 0 and storage.category != "gradient":
            owner = next((i for i in storage.saved_by if i >= 0), trace.ops[storage.alloc_op].call)
            key = key_of(owner)
        else:
            path = storage.label.removeprefix("gradient of ").rpartition(".")[0]
            named = storage.category in ("parameter", "buffer", "gradient") and path in paths
            key = (path, 0) if named else _NOBODY
        alive[key] = alive.get(key, 0) + storage.nbytes
    key = key_of(trace.ops[peak].call)
    alive[key] = alive.get(key, 0) + priced.op_workspace_bytes[peak]
    return alive


def _extra_seconds(trace: Trace, planned: PricedTrace, decisions: Sequence[Decision]) -> list[float]:
    """Returns the seconds of replays by call of `trace`, counted at the outermost region around the call."""
    home: dict[str, str] = {}
    for decision in decisions:
        if decision.is_region:
            for path in decision.paths:
                home.setdefault(path, decision.path)
    index = {(c.path, c.index): i for i, c in enumerate(trace.calls)}
    extra = [0.0] * len(trace.calls)
    calls = planned.trace.calls
    for i, op in enumerate(planned.trace.ops):
        if not op.replayed:
            continue
        at, owner = op.call, op.call
        while at >= 0:
            if calls[at].path in home:
                owner = at
            at = calls[at].parent
        if owner < 0:
            continue
        path = home.get(calls[owner].path, calls[owner].path)
        found = index.get((path, calls[owner].index), index.get((path, 0)))
        if found is not None:
            extra[found] += planned.op_seconds[i]
    return extra


def _actions(trace: Trace, decisions: Sequence[Decision]) -> list[tuple[str, bool]]:
    """Returns (what is done, whether a decision names it) for each call."""
    own: dict[str, list[Decision]] = {}
    spans: dict[str, Recompute] = {}
    for decision in decisions:
        own.setdefault(decision.path, []).append(decision)
        if isinstance(decision, Recompute):
            spans.update(dict.fromkeys(decision.span, decision))
    found: list[tuple[str, bool]] = []
    ambient: list[str] = []
    inside: list[bool] = []
    for call in trace.calls:
        inherited = ambient[call.parent] if call.parent >= 0 else "save"
        in_region = inside[call.parent] if call.parent >= 0 else False
        mine = [d for d in own.get(call.path, ()) if d.call is None or d.call == call.index]
        region = next((d for d in mine if isinstance(d, Region)), None)
        joined = spans.get(call.path)
        plain_one = next((d for d in mine if not isinstance(d, Region | Scan)), None)
        if region is not None:
            found.append(("recompute", True))
            ambient.append(region.inside)
            inside.append(True)
        elif joined is not None:
            found.append((f"recompute with {joined.path}", True))
            ambient.append(plain_one.verb if plain_one is not None else joined.inside)
            inside.append(True)
        else:
            action = plain_one.verb if plain_one is not None else inherited
            words = f"{action} in the replay" if in_region else action
            prefix = f"{call.path}." if call.path else ""
            below = (
                []
                if in_region
                else sorted(
                    {d.verb for d in decisions if d.path and d.path.startswith(prefix) and not isinstance(d, Scan)}
                    - {action}
                )
            )
            if below and call.children:
                words += f", inside: {', '.join(below)}"
            scans = [d for d in mine if isinstance(d, Scan)]
            words += "".join(f", {d.words()}" for d in scans)
            found.append((words, plain_one is not None or bool(scans)))
            ambient.append(action)
            inside.append(in_region)
    return found
