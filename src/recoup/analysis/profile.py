"""From a priced trace to a profile: no torch, nothing run."""

from __future__ import annotations

import numpy as np

from recoup.analysis.timeline import CATEGORIES, Level, category_levels, op_phase
from recoup.cost.model import PricedTrace
from recoup.ir.profile import Profile, ProfileRow
from recoup.ir.report import MOST_ROWS
from recoup.ir.trace import Trace


def make_profile(priced: PricedTrace, *, device: str = "", plain_peak_bytes: int = 0) -> Profile:
    """Returns the profile of a captured step.

    Args:
        device: what the step is planned for; left out: what it was captured for.
        plain_peak_bytes: the step's peak as plans have it; what it is beyond the tensors (libraries' workspaces,
            rounding) is shown as "library".
    """
    trace = priced.trace
    levels = category_levels(priced)
    beyond = max(0, plain_peak_bytes - int(np.sum([levels[c] for c in CATEGORIES], axis=0).max()))
    levels["library"] = levels["library"] + beyond
    total = np.sum([levels[c] for c in CATEGORIES], axis=0)
    at = int(total.argmax())
    alive = sorted((s for s in trace.storages if s.alloc_op <= at <= s.free_op), key=lambda s: -s.nbytes)
    return Profile(
        model_class=trace.model_class,
        device=device or trace.device,
        source=trace.source,
        reason=trace.reason,
        num_parameters=trace.num_parameters,
        peak_bytes=int(total[at]),
        phase=op_phase(trace, at),
        at_peak=tuple((c, int(levels[c][at])) for c in CATEGORIES if levels[c][at]),
        tensors=tuple((s.label, s.nbytes) for s in alive[:10]),
        rows=_rows(priced),
        timeline=tuple((c, _thinned(levels[c])) for c in CATEGORIES if levels[c].any()),
        phases=_phases(trace),
        step_seconds=float(sum(priced.op_seconds)),
        plain_flops=sum(trace.signatures[o.signature].flops for o in trace.ops),
        saved_bytes=trace.held_bytes,
        cost_source=priced.source,
    )


def _rows(priced: PricedTrace) -> tuple[ProfileRow, ...]:
    trace = priced.trace
    num = len(trace.calls)
    saved, forward, backward, flops = [0] * num, [0.0] * num, [0.0] * num, [0] * num
    for storage in trace.held_storages():
        if storage.saved_by and storage.saved_by[0] >= 0:
            saved[storage.saved_by[0]] += storage.nbytes
    for i, op in enumerate(trace.ops):
        if op.call < 0:
            continue
        if op.phase == "backward":
            backward[op.call] += priced.op_seconds[i]
        else:
            forward[op.call] += priced.op_seconds[i]
            flops[op.call] += trace.signatures[op.signature].flops
    saved, flops = trace.with_children(saved), trace.with_children(flops)
    forward, backward = trace.with_children(forward), trace.with_children(backward)
    depth = trace.depths()
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


def _stride(num_ops: int) -> int:
    """Returns how many ops are one point."""
    return max(1, -(-num_ops // MOST_ROWS))


def _thinned(level: Level) -> tuple[int, ...]:
    stride = _stride(len(level))
    padded = np.pad(level, (0, -len(level) % stride), mode="edge").reshape(-1, stride)
    return tuple(int(v) for v in padded.max(axis=1))


def _phases(trace: Trace) -> tuple[tuple[str, int, int], ...]:
    stride = _stride(len(trace.ops))
    phases: list[tuple[str, int, int]] = []
    for i, op in enumerate(trace.ops):
        if phases and phases[-1][0] == op.phase:
            phases[-1] = (op.phase, phases[-1][1], i + 1)
        else:
            phases.append((op.phase, i, i + 1))
    return tuple((name, first // stride, -(-last // stride)) for name, first, last in phases)
