"""One plan a pipeline stage: its peak with k microbatches in flight is the allocator's, and gradients stay equal."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import recoup
from recoup.evidence.memory import measure_peak, storage_bytes

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "pipeline_stage.py"))


def _run(stage: Any, inputs: list[torch.Tensor], gradients: list[torch.Tensor], num_in_flight: int) -> int:
    """Returns the peak of a stage's part of 1F1B, with the inputs it has received."""
    for parameter in stage.parameters():
        parameter.grad = None
    held = storage_bytes([*stage.parameters(), *inputs[:num_in_flight]])
    received = iter(gradients)
    return measure_peak(
        lambda: EXAMPLE["run_1f1b"](stage, inputs, lambda: next(received).clone(), num_in_flight),
        device=torch.device("cpu"),
        held_bytes=held,
    )


@pytest.mark.parametrize("num_in_flight", [1, 3])
def test_a_plan_holds_for_its_microbatches_in_flight(num_in_flight: int) -> None:
    torch.manual_seed(0)
    stage = EXAMPLE["Stage"](depth=2)
    inputs = [torch.randn(8, 64, 32, requires_grad=True) for _ in range(num_in_flight + 2)]
    gradients = [torch.randn(8, 64, 32) for _ in inputs]
    plan = EXAMPLE["plan_stage"](stage, inputs[0], num_in_flight, "60%")
    assert plan.decisions
    plain_peak = _run(stage, inputs, gradients, num_in_flight)
    plain = [p.grad.clone() for p in stage.parameters()]
    with recoup.apply(stage, plan):
        peak = _run(stage, inputs, gradients, num_in_flight)
        assert all(torch.equal(a, p.grad) for a, p in zip(plain, stage.parameters(), strict=True))
    print(num_in_flight, plain_peak, plan.predicted.plain_peak_bytes, peak, plan.predicted.peak_bytes)
    assert abs(plain_peak - plan.predicted.plain_peak_bytes) < 0.01 * plain_peak
    assert abs(peak - plan.predicted.peak_bytes) < 0.01 * peak
