"""A card with little more room than the plan's own: what `fit` does when a verified step runs out of memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import recoup
import recoup.api.fitting
from recoup.capture.step import Objective
from recoup.errors import StepOutOfMemory
from recoup.evidence.step_bench import StepBench
from recoup.ir.plan import Plan
from recoup.planner.driver import plan_for_budget
from recoup.planner.request import planner_for


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(*layers)


def test_a_smaller_plan_is_proved_when_a_larger_one_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    real, tried = recoup.api.fitting.verify_plan, []

    def verify_plan(model: nn.Module, plan: Plan, *args: Any, **kwargs: Any) -> Any:
        tried.append(plan.predicted.peak_bytes)
        if len(tried) == 1:
            raise StepOutOfMemory("no workspace was to be had")
        return real(model, plan, *args, **kwargs)

    monkeypatch.setattr(recoup.api.fitting, "verify_plan", verify_plan)
    model, x = _model(), torch.randn(512, 64)
    fit = recoup.fit(model, x, budget="80%", timed=False)
    assert fit.evidence.ok and fit.evidence.peak_bytes <= fit.plan.budget_bytes
    assert tried[1] <= tried[0] - 0.04 * fit.plan.budget_bytes, tried
    assert any("ran out of memory" in note for note in fit.plan.notes)


@pytest.mark.parametrize("budget", ["80%", "min"])
def test_where_no_plan_helps_the_error_is_the_one_that_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, budget: str
) -> None:
    def verify_plan(*args: Any, **kwargs: Any) -> Any:
        raise StepOutOfMemory("no workspace was to be had")

    monkeypatch.setattr(recoup.api.fitting, "verify_plan", verify_plan)
    model = _model()
    forwards = [m.forward for m in model.modules()]
    with pytest.raises(StepOutOfMemory, match="no workspace"):
        recoup.fit(model, torch.randn(512, 64), budget=budget, timed=False)
    assert [m.forward for m in model.modules()] == forwards


def test_replays_are_compared_on_half_the_batch_where_no_more_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    step, sizes = StepBench.step, []

    def limited(self: StepBench, *, take: bool = False, **options: Any) -> Any:
        sizes.append(len(self.batch))
        if len(sizes) <= 2:
            raise MemoryError
        return step(self, take=take, **options)

    monkeypatch.setattr(StepBench, "step", limited)
    model, x = _model(), torch.randn(512, 64)
    plan = recoup.plan(model, x, budget="60%", actions=("recompute",))
    evidence = recoup.verify(model, plan, x, timed=False)
    assert sizes[:3] == [512, 512, 256] and set(sizes[3:]) == {512}
    assert evidence.ok and any("256 of 512 examples" in note for note in evidence.notes)


def test_a_plan_that_the_card_cannot_hold_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _model(), torch.randn(512, 64)
    planner = planner_for(model, x, objective=Objective(), optimizer=None, device="a100-80gb", actions=None, cost=None)[
        0
    ]
    roomy, _ = plan_for_budget(planner, budget="90%", free_bytes=None, device="a100-80gb")
    planner.card_free_bytes = roomy.predicted.resumed_card_bytes - 1
    assert planner.card_free_bytes >= roomy.budget_bytes
    tight, _ = plan_for_budget(planner, budget="90%", free_bytes=None, device="a100-80gb")
    assert tight.predicted.resumed_card_bytes <= planner.card_free_bytes and tight.budget_bytes == roomy.budget_bytes
    assert tight.predicted.peak_bytes < roomy.predicted.peak_bytes
    assert any("a faster plan" in note for note in tight.notes)
    size = planner.card_size
    of_expandable = {"expandable_bytes": roomy.budget_bytes}
    monkeypatch.setattr(planner, "card_size", lambda chosen: dataclasses.replace(size(chosen), **of_expandable))
    planner.expandable = True  # the user's setting: no room is lost between segments
    planner.card_free_bytes = roomy.budget_bytes
    same, _ = plan_for_budget(planner, budget="90%", free_bytes=None, device="a100-80gb")
    assert same.decisions == roomy.decisions and any("that are set here" in note for note in same.notes)
    planner.expandable = False
    planner.card_free_bytes = roomy.budget_bytes - 1  # for another card than this one
    other, _ = plan_for_budget(planner, budget="90%", free_bytes=None, device="a100-80gb")
    assert other.decisions == roomy.decisions
