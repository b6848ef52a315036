"""Which results a region may keep so that its replay need not run the ops: found in the trace, dearest first.

The ops of a call are put together by label: attention, products with right factors of one shape, and so on. What a
label is worth is the time of its ops per byte of their results, so attention over a long sequence comes first, then
products that sum over many columns. The solver is offered the best label, the best two, and so on.
"""

from __future__ import annotations

from collections.abc import Callable

from recoup.cost.flops import result_label
from recoup.ir.trace import Call, Trace
from recoup.solver.problem import Keep
from recoup.thresholds import ESTIMATE_SHARE, MOST_TRIES


def keeps_of(
    trace: Trace, call: Call, stop: int, seconds: Callable[[int, int], float], *, overhead_seconds: float = 0.0
) -> tuple[Keep, ...]:
    """Returns the ways to keep results inside a region, each with one label more than the one before.

    Args:
        stop: the op its replay stops before.
        seconds: says how long ops [first, last) take.
        overhead_seconds: what it takes to keep anything.
    """
    ops: dict[str, list[int]] = {}
    for i in range(call.first_op, stop):
        signature = trace.signatures[trace.ops[i].signature]
        label = result_label(signature.name, signature.args)
        if label and not trace.ops[i].replayed:
            ops.setdefault(label, []).append(i)
    enough = ESTIMATE_SHARE * seconds(call.first_op, stop)
    found: list[Keep] = []
    for label, members in ops.items():
        results = [trace.storages[s] for s in dict.fromkeys(s for i in members for s in trace.ops[i].outputs)]
        keep = Keep(
            labels=(label,),
            nbytes=sum(s.nbytes for s in results),
            saved_inside_bytes=sum(s.nbytes for s in results if s.category == "saved" and s.saved_op < call.last_op),
            seconds=sum(seconds(i, i + 1) for i in members),
            flops=sum(trace.signatures[trace.ops[i].signature].flops for i in members),
        )
        if keep.seconds > enough and keep.nbytes:
            found.append(keep)
    found.sort(key=lambda keep: (-keep.seconds / keep.nbytes, keep.labels))
    ways: list[Keep] = []
    for keep in found[:MOST_TRIES]:
        none = Keep(labels=(), nbytes=0, saved_inside_bytes=0, seconds=-overhead_seconds, flops=0)
        before = ways[-1] if ways else none
        ways.append(
            Keep(
                labels=(*before.labels, *keep.labels),
                nbytes=before.nbytes + keep.nbytes,
                saved_inside_bytes=before.saved_inside_bytes + keep.saved_inside_bytes,
                seconds=before.seconds + keep.seconds,
                flops=before.flops + keep.flops,
            )
        )
    return tuple(ways)
