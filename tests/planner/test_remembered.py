"""Plans found before in this process: two captures in place of a search, and only where nothing differs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import recoup
from recoup.cost.model import FlopsCost
from recoup.planner import remembered, simulator


def test_a_second_plan_is_not_searched_again_unless_something_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    num_captures = 0
    capture = simulator.capture

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal num_captures
        num_captures += 1
        return capture(*args, **kwargs)  # type: ignore[arg-type]

    def plan(budget: str = "85%", width: int = 24, **options: object) -> tuple[recoup.ir.plan.Plan, int]:
        before = num_captures
        layers = [nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(3)]
        model, batch = nn.Sequential(*layers), torch.randn(128, width)
        made = recoup.plan(model, batch, budget=budget, cost=FlopsCost(), **options)  # type: ignore[arg-type]
        return made, num_captures - before

    monkeypatch.setattr(simulator, "capture", counting)
    remembered._plans().clear()
    first, searched = plan()
    again, recalled = plan()
    assert first.decisions and again == first
    assert recalled == 2 < searched  # the plain step, and the answer
    for other in (plan("90%"), plan(width=32), plan(keep=["0"]), plan(actions=["recompute"])):
        assert other[1] > 2
    # What runs otherwise under the plan than when it was found is searched anew.
    plans = remembered._plans()
    for key, known in plans.items():
        plans[key] = dataclasses.replace(known, peak_bytes=known.peak_bytes - 1)
    corrected, num = plan()
    assert corrected == first and num > 2
    assert plan()[1] == 2
