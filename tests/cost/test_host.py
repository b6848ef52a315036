"""Host time of a plan: by calls and ops that run again, on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from recoup.capture.capture import StepSpec, capture
from recoup.capture.step import Objective
from recoup.cost.host_overhead import (
    CALL_OVERHEAD_SECONDS,
    KEEP_OVERHEAD_SECONDS,
    REBUILD_OVERHEAD_SECONDS,
    RECORD_OVERHEAD_SECONDS,
    REGION_OVERHEAD_SECONDS,
    REPLAY_OVERHEAD_SECONDS,
    SEGMENT_OVERHEAD_SECONDS,
    TAPE_OVERHEAD_SECONDS,
    host_seconds,
    step_seconds,
)
from recoup.cost.model import price_by_signature
from recoup.ir.decision import Decision, Rebuild, Recompute, Rederive
from recoup.runtime.apply import apply_decisions


def test_host_time_grows_with_what_runs_again() -> None:
    block = lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())  # noqa: E731
    model = nn.Sequential(*(block() for _ in range(4)))
    spec = StepSpec(model=model, batch=torch.randn(4, 8), objective=Objective(loss=lambda output, batch: output.sum()))
    plain = capture(spec)

    def seconds(*decisions: Decision) -> float:
        with apply_decisions(model, decisions):
            return sum(host_seconds(decisions, capture(spec, known=plain), plain=plain))

    one = Recompute(path="1")
    span = dataclasses.replace(one, span=("2",))
    assert host_seconds((), plain, plain=plain) == (0.0, 0.0)
    # Its Linear and LayerNorm run again; what GELU saves is there before GELU runs.
    assert seconds(one) > REGION_OVERHEAD_SECONDS + 3 * CALL_OVERHEAD_SECONDS
    assert seconds(span) == pytest.approx(2 * seconds(one), rel=0.2)
    kept = seconds(dataclasses.replace(one, keep=("matmul:8x8",))) - seconds(one)
    assert kept == pytest.approx(3 * KEEP_OVERHEAD_SECONDS, rel=0.3)


def test_on_a_gpu_the_slower_of_host_and_device_counts_in_each_phase() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    spec = StepSpec(model=model, batch=torch.randn(4, 8), objective=Objective(loss=lambda output, batch: output.sum()))
    plain = dataclasses.replace(capture(spec), device="cuda")

    def seconds(op_seconds: float, *decisions: Decision) -> float:
        priced = price_by_signature(plain, lambda s: (op_seconds, 0), source="", is_estimate=True)
        return step_seconds(decisions, priced, plain=plain)

    num_ops = len(plain.ops)
    everywhere = Rederive(path="")
    assert seconds(1e-3) == pytest.approx(num_ops * 1e-3) == seconds(1e-3, everywhere)  # it hides behind the kernels
    assert seconds(1e-9) < 1e-5 * num_ops  # the host is slower: what it does on top counts
    num_forward = sum(o.phase in ("forward", "loss") for o in plain.ops)
    assert seconds(1e-9, everywhere) - seconds(1e-9) == pytest.approx(num_forward * RECORD_OVERHEAD_SECONDS)


def test_steps_of_a_scan_that_run_again_cost_their_ops_alone() -> None:
    spec = StepSpec(
        model=nn.Linear(8, 8), batch=torch.randn(4, 8), objective=Objective(loss=lambda output, batch: output.sum())
    )
    plain = capture(spec)
    views = [s.is_view for s in plain.signatures]
    again = dataclasses.replace(plain, ops=tuple(dataclasses.replace(o, replayed=True) for o in plain.ops))
    num_again = sum(not views[o.signature] for o in plain.ops)
    assert sum(host_seconds((), again, plain=plain)) == pytest.approx(num_again * REPLAY_OVERHEAD_SECONDS)
    rebuilding = dataclasses.replace(plain, num_rederived=5)  # with its segment a tensor is rebuilt for less
    for decision, each in ((Rebuild(path=""), SEGMENT_OVERHEAD_SECONDS), (Rederive(path=""), REBUILD_OVERHEAD_SECONDS)):
        assert host_seconds((decision,), rebuilding, plain=plain)[1] == pytest.approx(5 * each)
    scanned = host_seconds((), again, plain=plain, num_scan_replayed=num_again, num_scan_tapes=3)
    assert sum(scanned) == pytest.approx(3 * TAPE_OVERHEAD_SECONDS)
