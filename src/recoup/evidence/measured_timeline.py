"""Memory over a real step: the allocator's events with their times, and where forward and backward begin."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import record_function

from recoup import _torch
from recoup.capture.optimizer import OptimizerLike
from recoup.capture.snapshot import untouched
from recoup.capture.step import Objective
from recoup.evidence.memory import meter_name
from recoup.evidence.step_bench import StepBench
from recoup.ir.plan import Plan
from recoup.ir.report import MOST_ROWS, MeasuredTimeline
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions, plain

_MARK = "recoup step: "


def measure_timelines(
    model: nn.Module,
    plan: Plan | None,
    batch: Any,
    *,
    objective: Objective = Objective(),
    optimizer: OptimizerLike | None = None,
) -> tuple[MeasuredTimeline | None, MeasuredTimeline | None]:
    """Returns the measured memory of one plain and one planned step; the model is put back.

    Returns:
        (plain, planned); None where it was not run: the plan is None, or the model is not on the CPU (CUDA's
        allocator keeps no timed record without slowing the step).
    """
    if next(model.parameters()).device.type != "cpu":
        return None, None
    with untouched(model, batch, objective.functions):
        bench = StepBench(model, batch, objective, optimizer)
        with bench.optimizing():
            with plain(model):
                bench.step(take=True)
                _run(bench)  # what a first step allocates once and keeps is no part of the picture
                before = _run(bench)
            if plan is None:
                return before, None
            with apply_decisions(model, plan.decisions):
                return before, _run(bench)


@execution_context.unwatched()
def _run(bench: StepBench) -> MeasuredTimeline:
    bench.restore()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _torch.MemoryProfiler() as profiler:
            with record_function(_MARK + "forward"):
                value = bench.objective.run(bench.model, bench.batch)
            with record_function(_MARK + "backward"):
                value.backward()  # type: ignore[no-untyped-call]
            del value
            if bench.optimizer is not None:
                with record_function(_MARK + "optimizer"):
                    bench.step_optimizer()
    changes, marks = _torch.timed_memory_events(profiler, _MARK)
    begin, end = marks[0][1], marks[-1][2]
    held = bench.held_bytes()
    times = np.array([t for t, _ in changes], dtype=np.int64)
    levels = held + np.concatenate([[0], np.cumsum([b for _, b in changes])]).astype(np.int64)
    edges = np.linspace(begin, end, MOST_ROWS + 1)
    at = np.searchsorted(times, edges, side="right")  # levels[at[k]] is the level when column k begins
    totals = [int(levels[a : max(b, a) + 1].max()) for a, b in itertools.pairwise(at)]
    return MeasuredTimeline(
        seconds=tuple(float(e - begin) / 1e9 for e in edges[:-1]),
        total_bytes=tuple(totals),
        duration_seconds=(end - begin) / 1e9,
        phases=tuple((name, (a - begin) / 1e9, (b - begin) / 1e9) for name, a, b in marks),
        peak_bytes=int(levels.max()),
        meter=meter_name(torch.device("cpu")),
    )
