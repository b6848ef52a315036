"""A step as a Chrome trace, for Perfetto or chrome://tracing: lanes of calls, memory as counters.

Time in microseconds, as the trace event format wants it. The plain and the planned step are two processes, predicted;
what was measured of them are two more, on the clock of the measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from recoup.analysis.timeline import CATEGORIES, category_levels, op_phase
from recoup.cost.model import PricedTrace
from recoup.ir.decision import Decision, Region
from recoup.ir.report import MeasuredTimeline

_LANES = {"forward": 1, "loss": 1, "replay": 2, "backward": 3, "optimizer": 4, "regions": 5}


def make_chrome_trace(
    plain: PricedTrace,
    planned: PricedTrace | None = None,
    decisions: Sequence[Decision] = (),
    *,
    measured: tuple[MeasuredTimeline | None, MeasuredTimeline | None] = (None, None),
) -> dict[str, Any]:
    """Returns the trace as JSON data.

    Args:
        plain: the unplanned step.
        planned: the step with the plan.
        decisions: the plan's, for the lane of regions.
        measured: the plain and the planned step as they ran, where they did.
    """
    events = list(_step(plain, 1, "plain step (predicted)", ()))
    if planned is not None:
        events += _step(planned, 2, "planned step (predicted)", decisions)
    for process, name, timeline in zip((3, 4), ("plain", "planned"), measured, strict=True):
        if timeline is not None:
            events += _measured(timeline, process, f"{name} step (measured: {timeline.meter})")
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"prices": plain.source}}


def _step(priced: PricedTrace, process: int, name: str, decisions: Sequence[Decision]) -> Iterator[dict[str, Any]]:
    trace = priced.trace
    begins = [1e6 * s for s in accumulate(priced.op_seconds, initial=0.0)]
    yield _named(process, None, "process_name", name)
    lanes = {lane: number for lane, number in _LANES.items() if lane != "loss" and (lane != "regions" or decisions)}
    for lane, number in lanes.items():
        yield _named(process, number, "thread_name", lane)
        yield {"ph": "M", "pid": process, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}

    def slice_of(lane: int, title: str, first: int, last: int, **about: Any) -> dict[str, Any]:
        begin, end = begins[first], begins[last]
        return {
            "ph": "X",
            "pid": process,
            "tid": lane,
            "name": title,
            "ts": round(begin, 3),
            "dur": round(end - begin, 3),
            "args": about,
        }

    for call in trace.calls:
        if call.last_op > call.first_op:
            title = call.path or trace.model_class
            yield slice_of(1, title, call.first_op, call.last_op, module=call.kind, call=call.index)
    for phase, owner, first, last in _runs(priced):
        if phase == "forward":
            continue
        title = trace.calls[owner].path or trace.model_class if owner >= 0 else phase
        yield slice_of(_LANES[phase], title, first, last, ops=last - first)
    yield from _regions(priced, decisions, slice_of)
    yield from _counters(priced, process, begins)


def _measured(timeline: MeasuredTimeline, process: int, name: str) -> Iterator[dict[str, Any]]:
    """Yields the phases as they ran, and all memory in MiB."""
    yield _named(process, None, "process_name", name)
    yield _named(process, 1, "thread_name", "phases")
    for phase, begin, end in timeline.phases:
        about = {"ph": "X", "pid": process, "tid": 1, "name": phase}
        yield {**about, "ts": round(1e6 * begin, 3), "dur": round(1e6 * (end - begin), 3), "args": {}}
    for seconds, size in zip(timeline.seconds, timeline.total_bytes, strict=True):
        about = {"ph": "C", "pid": process, "name": "memory (MiB)"}
        yield {**about, "ts": round(1e6 * seconds, 3), "args": {"measured": round(size / 2**20, 3)}}


def _named(process: int, thread: int | None, kind: str, name: str) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "M", "pid": process, "name": kind, "args": {"name": name}}
    return event if thread is None else {**event, "tid": thread}


def _runs(priced: PricedTrace) -> Iterator[tuple[str, int, int, int]]:
    """Yields (phase, call, first op, last op + 1) of ops in a row that belong together."""
    trace = priced.trace
    first = 0
    for i in range(1, len(trace.ops) + 1):
        here = (op_phase(trace, first), trace.ops[first].call)
        if i == len(trace.ops) or (op_phase(trace, i), trace.ops[i].call) != here:
            yield (*here, first, i)
            first = i


def _regions(priced: PricedTrace, decisions: Sequence[Decision], slice_of: Any) -> Iterator[dict[str, Any]]:
    """Yields the forwards of the plan's outermost regions, spans as one."""
    calls = priced.trace.calls
    covered = -1
    by_path = {d.path: d for d in decisions if isinstance(d, Region)}
    for i, call in enumerate(calls):
        decision = by_path.get(call.path)
        if decision is None or decision.call not in (None, call.index) or call.first_op < covered:
            continue
        last = call.last_op
        span = [c for c in calls[i + 1 :] if c.path in decision.paths[1:] and c.index == call.index]
        last = max([last, *(c.last_op for c in span)])
        if last > call.first_op:
            covered = last
            title = f"recompute {call.path}" + (f" through {decision.paths[-1]}" if len(decision.paths) > 1 else "")
            yield slice_of(_LANES["regions"], title, call.first_op, last, inside=decision.inside)


def _counters(priced: PricedTrace, process: int, begins: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yields the memory at each op by category, in MiB."""
    levels = category_levels(priced)
    shown = [c for c in CATEGORIES if levels[c].any()]
    for at in range(len(priced.trace.ops)):
        values = {c: round(int(levels[c][at]) / 2**20, 3) for c in shown}
        yield {"ph": "C", "pid": process, "name": "memory (MiB)", "ts": round(begins[at], 3), "args": values}
