"""Host time of a plan besides its kernels: bookkeeping that solver and simulation charge alike.

Measured in steps of tenths of a second, whose kernels drive the interpreter's data out of the cache. On a CPU it adds
to the kernels. A GPU works beside the host: there each phase takes as long as the slower of the two, and what the host
does costs nothing until the queue of kernels runs dry.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from recoup.cost.model import PricedTrace
from recoup.ir.decision import Decision, Rebuild, Region
from recoup.ir.trace import Trace

# Calibration, on x86 CPUs: what steps with a plan take beyond their kernels, shared out by what happens in them.
REGION_OVERHEAD_SECONDS = 150e-6  # of a region: noting and putting back state, slots, the replay's start and end
CALL_OVERHEAD_SECONDS = 100e-6  # of a module's call in a replay: its hooks, its graph, the checks of what it saves
REPLAY_OVERHEAD_SECONDS = 15e-6  # of an op in a replay, its kernel aside
REBUILD_OVERHEAD_SECONDS = 105e-6  # of a rederived tensor: its search and its rebuild, the ops aside
# The two below are moved by what `bench.overhead` says of tiny steps (bench/results/overhead-cpu-2026-11-22.md): a
# tensor of a segment takes about half of what a rederived one does, a record 0.9 of what it took before.
SEGMENT_OVERHEAD_SECONDS = 50e-6  # of a tensor that is rebuilt with its segment, the ops aside
RECORD_OVERHEAD_SECONDS = 22e-6  # of a forward op that is recorded, so that what it makes can be rebuilt
KEEP_OVERHEAD_SECONDS = 60e-6  # of a forward op in a region that keeps results
TAPE_OVERHEAD_SECONDS = 30e-6  # of a call of autograd's engine for the taped steps of a scan
# Calibration: GPT-2 small at batch 1 on the stub GPU, CPU time.
FORWARD_OP_SECONDS = 5e-6  # of a dispatched op, its Python included
BACKWARD_OP_SECONDS = 4.5e-6  # the same in backward


def step_seconds(chosen: Sequence[Decision], priced: PricedTrace, *, plain: Trace) -> float:
    """Returns the time of forward, loss and backward, without copies.

    Args:
        priced: the step with `chosen` applied. plain: trace of the step without.
    """
    trace = priced.trace
    device = {"forward": 0.0, "backward": 0.0}
    launching = {"forward": 0.0, "backward": 0.0}
    for op, seconds in zip(trace.ops, priced.op_seconds, strict=True):
        if op.phase != "optimizer":
            phase = "backward" if op.phase == "backward" else "forward"
            device[phase] += seconds
            launching[phase] += BACKWARD_OP_SECONDS if op.phase == "backward" else FORWARD_OP_SECONDS
    forward, backward = host_seconds(
        chosen,
        trace,
        plain=plain,
        num_scan_replayed=priced.num_scan_replayed,
        num_scan_tapes=priced.num_scan_tapes,
    )
    if trace.device == "cpu":
        return device["forward"] + device["backward"] + forward + backward
    return max(device["forward"], launching["forward"] + forward) + max(
        device["backward"], launching["backward"] + backward
    )


def host_seconds(
    chosen: Sequence[Decision], trace: Trace, *, plain: Trace, num_scan_replayed: int = 0, num_scan_tapes: int = 0
) -> tuple[float, float]:
    """Returns the host time of a plan in forward and in backward, recording included, which the solver leaves out.

    Steps of scans that run again cost no more than their ops: there is no region around them.

    Args:
        trace: of the step with `chosen` applied. plain: of the step without.
        num_scan_replayed, num_scan_tapes: see `PricedTrace`.
    """
    by_path: dict[str, list[Region]] = {}
    for decision in chosen:
        if isinstance(decision, Region):
            for path in decision.paths:
                by_path.setdefault(path, []).append(decision)
    found = ((c, next((d for d in by_path.get(c.path, ()) if d.holds(c.index)), None)) for c in plain.calls)
    regions = [(call, decision) for call, decision in found if decision is not None]
    seconds = len(regions) * REGION_OVERHEAD_SECONDS
    starts = sorted(c.first_op for c in plain.calls if c.path and c.last_op > c.first_op)
    num_calls = sum(
        bisect.bisect_left(starts, max(c.replay_stop_op, c.first_op)) - bisect.bisect_left(starts, c.first_op)
        for c, _ in regions
    )
    is_view = [s.is_view for s in trace.signatures]
    num_replayed = sum(o.replayed and not is_view[o.signature] for o in trace.ops) - num_scan_replayed
    seconds += num_scan_tapes * TAPE_OVERHEAD_SECONDS
    seconds += num_calls * CALL_OVERHEAD_SECONDS + num_replayed * REPLAY_OVERHEAD_SECONDS
    in_segments = any(isinstance(d, Rebuild) for d in chosen)
    seconds += trace.num_rederived * (SEGMENT_OVERHEAD_SECONDS if in_segments else REBUILD_OVERHEAD_SECONDS)
    recording = 0.0
    if any(d.rederives for d in chosen):
        recording = trace.num_forward_ops * RECORD_OVERHEAD_SECONDS
    is_view = [s.is_view for s in plain.signatures]
    watched = [c for c, decision in regions if decision.keep]
    num_watched = sum(not is_view[o.signature] for c in watched for o in plain.ops[c.first_op : c.last_op])
    return recording + num_watched * KEEP_OVERHEAD_SECONDS, seconds
