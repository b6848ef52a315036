"""From a priced trace to a profile: no torch, nothing run."""

from __future__ import annotations

import numpy as np

from recoup.cost.model import PricedTrace
from recoup.ir.profile import Profile, ProfileRow

_CATEGORIES = ("parameter", "buffer", "optimizer", "gradient", "batch", "saved", "temporary")
_MAX_POINTS = 2000  # of the timeline in JSON: a step of more ops is thinned out


def make_profile(priced: PricedTrace) -> Profile:
    """Returns the profile of a captured step."""
    trace = priced.trace
    levels = np.asarray(trace.levels(priced.op_workspace_bytes))
    at = int(levels.argmax())
    alive = [s for s in trace.storages if s.alloc_op <= at <= s.free_op]
    by_category: dict[str, int] = {}
    for storage in alive:
        by_category[storage.category] = by_category.get(storage.category, 0) + storage.nbytes
    if priced.op_workspace_bytes[at]:
        by_category["temporary"] = by_category.get("temporary", 0) + priced.op_workspace_bytes[at]
    alive.sort(key=lambda s: -s.nbytes)
    num_forward = sum(1 for o in trace.ops if o.phase in ("forward", "loss"))
    op = trace.ops[at]
    return Profile(
        model_class=trace.model_class,
        device=trace.device,
        source=trace.source,
        reason=trace.reason,
        num_parameters=trace.num_parameters,
        peak_bytes=int(levels[at]),
        phase="replay" if op.replayed else op.phase,
        at_peak=tuple((c, by_category[c]) for c in _CATEGORIES if c in by_category),
        tensors=tuple((s.label, s.nbytes) for s in alive[:10]),
        rows=_rows(priced),
        timeline=_timeline(priced),
        phases=_phases(priced, len(levels)),
        step_seconds=float(sum(priced.op_seconds)),
        plain_flops=sum(trace.signatures[o.signature].flops for o in trace.ops),
        saved_bytes=sum(
            s.nbytes for s in trace.storages if s.category == "saved" and s.alloc_op < num_forward <= s.free_op
        ),
        cost_source=priced.source,
    )


def _rows(priced: PricedTrace) -> tuple[ProfileRow, ...]:
    trace = priced.trace
    num = len(trace.calls)
    saved, forward, backward, flops = [0] * num, [0.0] * num, [0.0] * num, [0] * num
    for storage in trace.storages:
        if storage.category == "saved" and storage.saved_by and storage.saved_by[0] >= 0:
            saved[storage.saved_by[0]] += storage.nbytes
    for i, op in enumerate(trace.ops):
        if op.call < 0:
            continue
        if op.phase == "backward":
            backward[op.call] += priced.op_seconds[i]
        else:
            forward[op.call] += priced.op_seconds[i]
            flops[op.call] += trace.signatures[op.signature].flops
    depth = [0] * num
    for i, call in enumerate(trace.calls):
        depth[i] = depth[call.parent] + 1 if call.parent >= 0 else 0
    for i in range(num - 1, -1, -1):  # children come after their parents
        parent = trace.calls[i].parent
        if parent >= 0:
            saved[parent] += saved[i]
            forward[parent] += forward[i]
            backward[parent] += backward[i]
            flops[parent] += flops[i]
    return tuple(
        ProfileRow(
            path=c.path,
            call=c.index,
            kind=c.kind,
            depth=depth[i],
            saved_bytes=saved[i],
            forward_seconds=forward[i],
            backward_seconds=backward[i],
            forward_flops=flops[i],
        )
        for i, c in enumerate(trace.calls)
    )


def _timeline(priced: PricedTrace) -> tuple[tuple[str, tuple[int, ...]], ...]:
    trace = priced.trace
    num_ops = len(trace.ops)
    change = {c: np.zeros(num_ops + 2, dtype=np.int64) for c in _CATEGORIES}
    for storage in trace.storages:
        change[storage.category][max(storage.alloc_op, 0)] += storage.nbytes
        change[storage.category][min(storage.free_op, num_ops) + 1] -= storage.nbytes
    stride = max(1, -(-num_ops // _MAX_POINTS))
    result = []
    for category in _CATEGORIES:
        level = np.cumsum(change[category])[:num_ops]
        if category == "temporary":
            level = level + np.asarray(priced.op_workspace_bytes, dtype=np.int64)
        if level.any():
            padded = np.pad(level, (0, -len(level) % stride), mode="edge").reshape(-1, stride)
            result.append((category, tuple(int(v) for v in padded.max(axis=1))))
    return tuple(result)


def _phases(priced: PricedTrace, num_ops: int) -> tuple[tuple[str, int, int], ...]:
    stride = max(1, -(-num_ops // _MAX_POINTS))
    phases: list[tuple[str, int, int]] = []
    for i, op in enumerate(priced.trace.ops):
        if phases and phases[-1][0] == op.phase:
            phases[-1] = (op.phase, phases[-1][1], i + 1)
        else:
            phases.append((op.phase, i, i + 1))
    return tuple((name, first // stride, -(-last // stride)) for name, first, last in phases)
