"""Host time of a plan: by calls and ops that run again, on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from recoup.capture.capture import StepSpec, capture
from recoup.cost.host_overhead import (
    CALL_OVERHEAD_SECONDS,
    KEEP_OVERHEAD_SECONDS,
    REGION_OVERHEAD_SECONDS,
    REPLAY_OVERHEAD_SECONDS,
    TAPE_OVERHEAD_SECONDS,
    host_seconds,
)
from recoup.ir.decision import Decision, Recompute
from recoup.runtime.apply import apply_decisions


def test_host_time_grows_with_what_runs_again() -> None:
    block = lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())  # noqa: E731
    model = nn.Sequential(*(block() for _ in range(4)))
    spec = StepSpec(model=model, batch=torch.randn(4, 8), loss=lambda output, batch: output.sum())
    plain = capture(spec)

    def seconds(*decisions: Decision) -> float:
        with apply_decisions(model, decisions):
            return host_seconds(decisions, capture(spec, known=plain), plain=plain)

    one = Recompute(path="1")
    span = dataclasses.replace(one, span=("2",))
    assert host_seconds((), plain, plain=plain) == 0.0
    # Its Linear and LayerNorm run again; what GELU saves is there before GELU runs.
    assert seconds(one) > REGION_OVERHEAD_SECONDS + 3 * CALL_OVERHEAD_SECONDS
    assert seconds(span) == pytest.approx(2 * seconds(one), rel=0.2)
    kept = seconds(dataclasses.replace(one, keep=("matmul:8x8",))) - seconds(one)
    assert kept == pytest.approx(3 * KEEP_OVERHEAD_SECONDS, rel=0.3)
    on_gpu = dataclasses.replace(plain, device="cuda")
    assert host_seconds((one,), on_gpu, plain=plain) == REGION_OVERHEAD_SECONDS


def test_steps_of_a_scan_that_run_again_cost_their_ops_alone() -> None:
    spec = StepSpec(model=nn.Linear(8, 8), batch=torch.randn(4, 8), loss=lambda output, batch: output.sum())
    plain = capture(spec)
    views = [s.is_view for s in plain.signatures]
    again = dataclasses.replace(plain, ops=tuple(dataclasses.replace(o, replayed=True) for o in plain.ops))
    num_again = sum(not views[o.signature] for o in plain.ops)
    assert host_seconds((), again, plain=plain) == pytest.approx(num_again * REPLAY_OVERHEAD_SECONDS)
    scanned = host_seconds((), again, plain=plain, num_scan_replayed=num_again, num_scan_tapes=3)
    assert scanned == pytest.approx(3 * TAPE_OVERHEAD_SECONDS)
