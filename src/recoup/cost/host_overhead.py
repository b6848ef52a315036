"""Host time of a plan besides its kernels: bookkeeping that solver and simulation charge by one formula.

On a CPU it adds to the kernels. A GPU works beside the host: there each phase takes as long as the slower of the two,
and what the host does costs nothing until the queue of kernels runs dry. What each piece of bookkeeping takes is in
`host_costs.py`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from recoup.cost.host_costs import HostCosts
from recoup.cost.model import PricedTrace
from recoup.ir.decision import Decision, LossInPlace, Rebuild, Region, follow_programs
from recoup.ir.trace import Call, Trace


def step_seconds(chosen: Sequence[Decision], priced: PricedTrace, *, plain: Trace) -> float:
    """Returns the seconds of forward, loss and backward, without copies.

    Args:
        chosen: the decisions that are applied.
        priced: the step with `chosen` applied.
        plain: trace of the step without.
    """
    trace, costs = priced.trace, priced.host_costs
    device, num_ops = _by_phase(chosen, priced)
    forward, backward = host_seconds(
        chosen,
        trace,
        plain=plain,
        costs=costs,
        num_scan_replayed=priced.num_scan_replayed,
        num_scan_tapes=priced.num_scan_tapes,
    )
    if trace.device == "cpu":
        return sum(device) + forward + backward
    launching = num_ops[0] * costs.forward_op_seconds, num_ops[1] * costs.backward_op_seconds
    return max(device[0], launching[0] + forward) + max(device[1], launching[1] + backward)


def device_seconds(chosen: Sequence[Decision], priced: PricedTrace) -> float:
    """Returns the seconds of the ops of forward, loss and backward alone; arguments as of `step_seconds`."""
    return sum(_by_phase(chosen, priced)[0])


def _by_phase(chosen: Sequence[Decision], priced: PricedTrace) -> tuple[tuple[float, float], tuple[int, int]]:
    """Returns the seconds of the ops of forward (and loss) and of backward, and their numbers."""
    of_first_step = _only_in_first_step(priced.trace) if follow_programs(chosen) else frozenset()
    seconds, num_ops = [0.0, 0.0], [0, 0]
    for i, (op, of_op) in enumerate(zip(priced.trace.ops, priced.op_seconds, strict=True)):
        if op.phase != "optimizer" and i not in of_first_step:
            seconds[op.phase == "backward"] += of_op
            num_ops[op.phase == "backward"] += 1
    return (seconds[0], seconds[1]), (num_ops[0], num_ops[1])


def host_seconds(
    chosen: Sequence[Decision],
    trace: Trace,
    *,
    plain: Trace,
    costs: HostCosts,
    num_scan_replayed: int = 0,
    num_scan_tapes: int = 0,
) -> tuple[float, float]:
    """Returns the host seconds that a plan adds to forward and to backward.

    The sum is linear in `costs`, which their calibration rests on. Steps of scans that run again cost no more than
    their ops: there is no region around them.

    Args:
        chosen: the decisions that are applied.
        trace: of the step with `chosen` applied.
        plain: of the step without.
        costs: of this host.
        num_scan_replayed: ops of scans' steps that ran again.
        num_scan_tapes: calls of autograd's engine in scans.
    """
    by_path: dict[str, list[Region]] = {}
    for decision in chosen:
        if isinstance(decision, Region):
            for path in decision.paths:
                by_path.setdefault(path, []).append(decision)
    found = ((c, next((d for d in by_path.get(c.path, ()) if d.holds(c.index)), None)) for c in plain.calls)
    regions = [(call, decision) for call, decision in found if decision is not None]
    starts = sorted(c.first_op for c in plain.calls if c.path and c.last_op > c.first_op)
    num_calls = sum(
        bisect.bisect_left(starts, max(c.replay_stop_op, c.first_op)) - bisect.bisect_left(starts, c.first_op)
        for c, _ in regions
    )
    num_replayed = sum(o.replayed and not trace.signatures[o.signature].is_view for o in trace.ops)
    num_again = num_replayed - num_scan_replayed
    num_regions = math.fsum(1 / decision.calls_at_a_time for _, decision in regions)
    num_passed, num_passed_again = _num_passed(plain, regions)
    backward = num_regions * costs.region_seconds + num_scan_tapes * costs.tape_seconds
    backward += num_passed_again * costs.passed_call_seconds
    forward = num_passed * costs.passed_call_seconds
    is_by_tensor = any(isinstance(d, Rebuild) for d in chosen)
    watches_calls = follow_programs(chosen) and any(d.records for d in chosen)  # a loss among them
    if not watches_calls and any(isinstance(d, LossInPlace) for d in chosen):
        forward += sum(op.begins_call for op in plain.ops[: plain.num_forward_ops]) * costs.loss_call_seconds
    if follow_programs(chosen):
        num_kept, num_rebuilt = num_packed_beside(trace)
        forward += (trace.num_rederived - num_rebuilt) * costs.packed_tensor_seconds
        forward += (num_kept + num_rebuilt) * costs.beside_tensor_seconds
        each = costs.followed_tensor_seconds if is_by_tensor else costs.single_tensor_seconds
        backward += trace.num_rederived * each + num_again * costs.rerun_op_seconds
    else:
        backward += trace.num_rederived * costs.rederived_tensor_seconds
        share = _noticed_share(plain, [(c.first_op, max(c.replay_stop_op, c.first_op)) for c, _ in regions])
        backward += costs.replay_seconds(num_ops=num_again * share, num_calls=num_calls)
        if any(decision.rederives for _, decision in regions):
            backward += num_replayed * costs.recorded_op_seconds
        if any(d.records for d in chosen):
            num_forward = sum(not trace.signatures[o.signature].is_view for o in trace.ops[: trace.num_forward_ops])
            forward += num_forward * costs.recorded_op_seconds
    watched = [c for c, decision in regions if decision.keep]
    num_watched = sum(
        not plain.signatures[o.signature].is_view for c in watched for o in plain.ops[c.first_op : c.last_op]
    )
    forward += num_watched * costs.watched_op_seconds
    return forward, backward


def _only_in_first_step(trace: Trace) -> frozenset[int]:
    """Returns the ops by which a step that is recorded keeps random masks that nothing is rebuilt from.

    What is read in backward is not known before it; the steps that follow the program keep no others.
    """
    found: set[int] = set()
    read: set[int] = set()
    for i in range(len(trace.ops) - 1, -1, -1):
        op = trace.ops[i]
        if op.replayed and op.phase in ("forward", "loss") and op.outputs and read.isdisjoint(op.outputs):
            found.add(i)
        else:
            read.update(op.inputs)
    return frozenset(found)


def _num_passed(plain: Trace, regions: Sequence[tuple[Call, Region]]) -> tuple[int, int]:
    """Returns how many calls of patched modules nothing is decided about: in forward, and in replays."""
    paths = {call.path for call, decision in regions if decision.call is not None}
    decided = {(call.path, call.index) for call, _ in regions}
    passed = sorted(c.first_op for c in plain.calls if c.path in paths and (c.path, c.index) not in decided)
    spans = [(call.first_op, max(call.replay_stop_op, call.first_op)) for call, _ in regions] if passed else []
    num_again = sum(bisect.bisect_left(passed, stop) - bisect.bisect_left(passed, start) for start, stop in spans)
    return len(passed), num_again


def num_packed_beside(trace: Trace) -> tuple[int, int]:
    """Returns how many saved tensors share a hooked call with one that will be rebuilt: kept ones, rebuilt ones.

    Hooks are on for a call of a torch function as a whole. The first rebuilt tensor of a call pays for that.
    """
    calls = list(itertools.accumulate(op.begins_call for op in trace.ops))
    rebuilt = [calls[op] for op, _ in trace.rederive_links if op < len(calls)]
    hooked = set(rebuilt)
    num_kept = sum(calls[op] in hooked for storage in trace.storages for op in storage.saved_ops if op < len(calls))
    return num_kept, len(rebuilt) - len(hooked)


def noticed_ops(trace: Trace) -> list[bool]:
    """Returns for each op whether a replay spends host time on it, views aside.

    It does on the first op of a call of a torch function and on those that autograd saves something for. What else a
    call runs inside, as a GRU's cell does, takes its kernels' time alone.
    """
    saving = {op for storage in trace.storages for op in storage.saved_ops}
    found, begins = [], False
    for i, op in enumerate(trace.ops):
        begins = begins or op.begins_call
        is_view = trace.signatures[op.signature].is_view
        found.append(not is_view and (begins or i in saving))
        begins = begins and is_view  # the first op that is none stands for the call
    return found


def _noticed_share(trace: Trace, ranges: Sequence[tuple[int, int]]) -> float:
    """Returns the share of noticed ops among those of some ranges, views aside."""
    if not ranges:
        return 1.0
    noticed = noticed_ops(trace)
    replayed = itertools.chain.from_iterable(itertools.starmap(range, ranges))
    ops = [i for i in replayed if not trace.signatures[trace.ops[i].signature].is_view]
    return sum(noticed[i] for i in ops) / len(ops) if ops else 1.0
