"""How long a search goes on once a plan fits, counted in simulated ops."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from recoup.capture.spec import StepSpec
from recoup.cost.model import FlopsCost
from recoup.planner.driver import Planner


def test_less_effort_simulates_less_and_still_fits() -> None:
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16)) for _ in range(4)]
    model, batch = nn.Sequential(*blocks), torch.randn(256, 16)
    num_ops: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for effort in ("low", "normal", "high"):
        planner = Planner(StepSpec(model=model, batch=batch), cost=FlopsCost(), actions=None, effort=effort)
        seconds[effort] = 0.0
        for share in (0.9, 0.6, 0.5):  # at some of them the first answer leaves nothing to look for
            budget_bytes = int(share * planner.plain.peak_bytes)
            found = planner.fit(budget_bytes)
            assert found is not None and found.peak_bytes <= budget_bytes
            seconds[effort] += found.step_seconds
        num_ops[effort] = planner.num_simulated_ops
    assert num_ops["low"] < num_ops["normal"] <= num_ops["high"]
    assert seconds["low"] >= seconds["normal"] >= seconds["high"]
    # "low" is not the first thing that fits (all rederived): it has what the solvers say is fastest.
    assert seconds["low"] <= 1.03 * seconds["normal"]


def test_effort_has_a_name() -> None:
    with pytest.raises(recoup.UsageError, match="low, normal, high"):
        recoup.plan(nn.Linear(4, 4), torch.randn(2, 4), budget="80%", effort="much")  # type: ignore[arg-type]
