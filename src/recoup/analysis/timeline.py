"""From priced traces to what a report draws: memory over the step, and the module tree; no torch, nothing run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from recoup.cost.model import PricedTrace
from recoup.ir.decision import Decision, Recompute, Region, Scan
from recoup.ir.labels import group_labels
from recoup.ir.report import TIMELINE_POINTS, ModuleRow, Timeline
from recoup.ir.trace import Trace

CATEGORIES = ("parameter", "buffer", "library", "optimizer", "batch", "gradient", "saved", "temporary")
_NUM_TENSORS = 8  # named in the chart, the largest: more would not be read
_NOBODY = ("", -1)  # the loss outside the model
_Levels = dict[str, "np.ndarray[tuple[int], np.dtype[np.int64]]"]


def category_levels(priced: PricedTrace) -> _Levels:
    """Returns the bytes alive during each op, by category; hidden workspace counts as temporary."""
    trace = priced.trace
    num_ops = len(trace.ops)
    change = {c: np.zeros(num_ops + 2, dtype=np.int64) for c in CATEGORIES}
    for storage in trace.storages:
        change[storage.category][max(storage.alloc_op, 0)] += storage.nbytes
        change[storage.category][min(storage.free_op, num_ops) + 1] -= storage.nbytes
    levels = {c: np.cumsum(change[c])[:num_ops] for c in CATEGORIES}
    levels["temporary"] = levels["temporary"] + np.asarray(priced.op_workspace_bytes, dtype=np.int64)
    return levels


def op_phase(trace: Trace, index: int) -> str:
    """Returns the phase of an op as reports name it: a second run is "replay"."""
    op = trace.ops[index]
    return "replay" if op.replayed else op.phase


def make_timeline(priced: PricedTrace, *, plain: PricedTrace | None = None, fixed_bytes: int = 0) -> Timeline:
    """Returns memory over the step of `priced`.

    Args:
        plain: the plain step, whose optimizer part follows where `priced` was captured without one (no plan changes
            it). fixed_bytes: what the device takes whatever the step does; shown as "library".
    """
    trace = priced.trace
    levels = category_levels(priced)
    seconds = np.asarray(priced.op_seconds)
    phases = [op_phase(trace, i) for i in range(len(trace.ops))]
    if plain is not None and "optimizer" not in phases:
        at = [i for i, o in enumerate(plain.trace.ops) if o.phase == "optimizer"]
        if at:
            rest = category_levels(plain)
            levels = {c: np.concatenate([levels[c], rest[c][at]]) for c in CATEGORIES}
            seconds = np.concatenate([seconds, np.asarray(plain.op_seconds)[at]])
            phases += ["optimizer"] * len(at)
    levels["library"] = levels["library"] + fixed_bytes
    total = np.sum([levels[c] for c in CATEGORIES], axis=0)
    begins = np.concatenate([[0.0], np.cumsum(seconds)])
    peak = int(total.argmax())
    stops = _columns(begins, peak)
    return Timeline(
        seconds=tuple(float(begins[i]) for i in stops[:-1]),
        duration_seconds=float(begins[-1]),
        series=tuple((c, _at_column_peaks(levels[c], total, stops)) for c in CATEGORIES if levels[c].any()),
        phases=_merge_phases(phases, begins),
        peak_seconds=float(begins[peak]),
        peak_bytes=int(total[peak]),
        phase=phases[peak],
        at_peak=tuple((c, int(levels[c][peak])) for c in CATEGORIES if levels[c][peak]),
        tensors=_tensors(priced, plain, peak),
    )


def _columns(begins: np.ndarray, peak: int) -> list[int]:  # type: ignore[type-arg]
    """Returns the first op of each column, and the end: columns of equal time; the peak begins one of its own."""
    num_ops = len(begins) - 1
    edges = np.linspace(0.0, begins[-1], TIMELINE_POINTS + 1)[:-1]
    first = np.unique(np.searchsorted(begins[:-1], edges, side="left"))
    first = np.unique(np.concatenate([[0], first, [peak]]))
    return [*(int(i) for i in first if i < num_ops), num_ops]


def _at_column_peaks(level: np.ndarray, total: np.ndarray, stops: Sequence[int]) -> tuple[int, ...]:  # type: ignore[type-arg]
    """Returns the level at the moment of each column when the total is largest, so that the stack adds up."""
    return tuple(int(level[a + int(total[a:b].argmax())]) for a, b in itertools.pairwise(stops))


def _merge_phases(phases: Sequence[str], begins: np.ndarray) -> tuple[tuple[str, float, float], ...]:  # type: ignore[type-arg]
    merged: list[tuple[str, float, float]] = []
    for i, phase in enumerate(phases):
        begin, end = float(begins[i]), float(begins[i + 1])
        if merged and merged[-1][0] == phase:
            merged[-1] = (phase, merged[-1][1], end)
        else:
            merged.append((phase, begin, end))
    return tuple(merged)


def _tensors(priced: PricedTrace, plain: PricedTrace | None, peak: int) -> tuple[tuple[str, int], ...]:
    trace = priced.trace
    if peak >= len(trace.ops) and plain is not None:  # in the optimizer's part
        offset = next(i for i, o in enumerate(plain.trace.ops) if o.phase == "optimizer")
        peak += offset - len(trace.ops)
        priced, trace = plain, plain.trace
    alive = [(s.label, s.nbytes) for s in trace.storages if s.alloc_op <= peak <= s.free_op]
    workspace = priced.op_workspace_bytes[peak]
    if workspace:
        alive.append((f"workspace of {trace.signatures[trace.ops[peak].signature].name}", workspace))
    return tuple(group_labels(alive)[:_NUM_TENSORS])


def module_rows(
    plain: PricedTrace, planned: PricedTrace | None, decisions: Sequence[Decision]
) -> tuple[ModuleRow, ...]:
    """Returns the module tree with what each call keeps, with and without the plan, and what that costs.

    A storage counts for the first call that saves it. A second run counts for the region that runs (a span's for its
    first call), a rederived tensor for the call that needed it.
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
    saved, kept = [before.get((c.path, c.index), 0) for c in trace.calls], [0] * num
    for i, call in enumerate(trace.calls):
        kept[i] = after.get((call.path, call.index), 0)
    depth = [0] * num
    for i, call in enumerate(trace.calls):
        depth[i] = depth[call.parent] + 1 if call.parent >= 0 else 0
    for i in range(num - 1, -1, -1):  # children come after their parents
        parent = trace.calls[i].parent
        if parent >= 0:
            saved[parent] += saved[i]
            kept[parent] += kept[i]
            extra[parent] += extra[i]
            forward[parent] += forward[i]
    actions = _actions(trace, decisions)
    in_loss = before.get(_NOBODY, 0), after.get(_NOBODY, 0)
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
            extra_seconds=extra[i],
            forward_seconds=forward[i],
        )
        for i, call in enumerate(trace.calls)
    )
    if not any(in_loss):
        return rows
    loss = ModuleRow(
        path="(loss)",
        call=0,
        kind="outside the model",
        depth=0,
        action="save",
        is_decided=False,
        plain_saved_bytes=in_loss[0],
        saved_bytes=in_loss[1],
        extra_seconds=0.0,
        forward_seconds=sum(s for s, o in zip(plain.op_seconds, trace.ops, strict=True) if o.phase == "loss"),
    )
    return (*rows, loss)


def _held(trace: Trace) -> dict[tuple[str, int], int]:
    """Returns bytes held when backward begins, by the call that first saves them."""
    end = sum(1 for o in trace.ops if o.phase in ("forward", "loss"))
    held: dict[tuple[str, int], int] = {}
    for storage in trace.storages:
        if storage.category == "saved" and storage.alloc_op < end <= storage.free_op:
            owner = storage.saved_by[0] if storage.saved_by else -1
            key = (trace.calls[owner].path, trace.calls[owner].index) if owner >= 0 else _NOBODY
            held[key] = held.get(key, 0) + storage.nbytes
    return held


def _extra_seconds(trace: Trace, planned: PricedTrace, decisions: Sequence[Decision]) -> list[float]:
    """Returns seconds of second runs by call of `trace`, at the outermost region that holds the call."""
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
