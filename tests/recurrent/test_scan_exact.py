"""Whatever the schedule, a scan leaves behind what the plain loop does, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recoup.evidence.memory import measure_peak
from recoup.recurrent import ScanReport, scan
from tests.recurrent.helpers import NETWORKS, differing, train_once

pytestmark = pytest.mark.slow

OPTIONS: list[dict[str, Any]] = [
    {},
    {"chunk": 1},
    {"chunk": 100},
    {"slots": 1},
    {"slots": 3},
    {"budget": "80%"},
    {"budget": 20_000},
    {"slots": 3, "rederive": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_bit_equal(name: str, options: dict[str, Any]) -> None:
    make, sizes = NETWORKS[name]
    torch.manual_seed(0)
    network = make()
    for num_steps in (1, 2, 3, 19):
        if "80%" in options.values() and num_steps < 19:
            continue  # below what one step needs
        expected, _ = train_once(network, sizes, num_steps, None)
        found, report = train_once(network, sizes, num_steps, options)
        assert differing(expected, found) == [], num_steps
        assert report.evaluations == report.predicted_evaluations


@pytest.mark.parametrize("outputs", ["sum", "mean", "last"])
@pytest.mark.parametrize("name", NETWORKS)
def test_reduced_outputs(name: str, outputs: str) -> None:
    make, sizes = NETWORKS[name]
    torch.manual_seed(0)
    network = make()
    expected, _ = train_once(network, sizes, 11, None, outputs)
    found, _ = train_once(network, sizes, 11, {"slots": 2}, outputs)
    assert differing(expected, found) == []


def test_the_smallest_budgets_are_not_overrun_while_steps_are_measured() -> None:
    """The first steps' tapes are let go before one is measured, where the budget holds hardly more than one."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(8, 64)

        def step(self, h: Any, x: torch.Tensor) -> Any:
            h = self.cell(x, h)
            return h, h.sum()

    network, x, start = Wide(), torch.randn(20, 64, 8), torch.zeros(64, 64)
    results = sum(p.numel() * p.element_size() for p in network.parameters()) + start.numel() * 4
    report = ScanReport()
    scan(network.step, x, start, budget="50%", report=report)
    step = report.step_bytes
    assert step is not None
    for budget in (step.working + step.tape, step.working + 2 * step.tape, step.working + 5 * step.tape):
        network.zero_grad()
        peak = measure_peak(
            lambda b=budget: scan(network.step, x, start, budget=b, outputs="sum")[1].backward(),  # type: ignore[misc]
            device=torch.device("cpu"),
            held_bytes=0,
        )
        assert peak - results <= budget
