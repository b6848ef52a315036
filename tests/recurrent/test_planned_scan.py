"""Scans inside of a model whose bytes a plan decides: found, priced, chosen, saved, shown, exported, verified."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.analysis.module_table import module_rows
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.cost.model import CostModel, PricedTrace, price_by_signature
from recoup.errors import InfeasibleBudget, UsageError
from recoup.evidence.verify import verify_plan
from recoup.export.left_out import left_out
from recoup.export.plain_torch import export_torch
from recoup.ir.decision import Scan, describe_decisions
from recoup.ir.plan import Plan
from recoup.ir.trace import Trace
from recoup.planner.driver import Planner
from recoup.planner.simulator import Simulator
from recoup.recurrent import ScanReport, scan, unroll
from recoup.recurrent.schedule_costs import evaluations_by_bytes
from recoup.recurrent.schedules.tapes import tape_schedule
from recoup.report.diff import diff_plans
from recoup.runtime.apply import apply_decisions

T, BATCH, FEATURES, HIDDEN = 16, 16, 8, 24
ALL_TAPED = T + 1  # the step that is measured is evaluated once more


class Trunk(nn.Module):
    """A GRU cell by `scan`, whose mean output is returned."""

    def __init__(self, features: int = FEATURES, outputs: Any = "mean", **options: Any) -> None:
        super().__init__()
        self.cell = nn.GRUCell(features, HIDDEN)
        self.outputs = outputs
        self.options = options
        self.report = ScanReport()

    def step(self, h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.cell(x, h)
        return h, h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = x.new_zeros(x.shape[1], HIDDEN)
        ys: torch.Tensor = scan(self.step, x, start, outputs=self.outputs, report=self.report, **self.options)[1]
        return ys


class Model(nn.Module):
    """An encoder, a scan over time, a head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, FEATURES), nn.GELU(), nn.Linear(FEATURES, FEATURES))
        self.trunk = Trunk(**options)
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(self.encoder(x)))


class TwoScans(nn.Module):
    """Two scans, one after the other in one call's own forward, and a third in a module inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Trunk(outputs="stack")
        self.cell = nn.GRUCell(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 4)

    def step(self, h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.cell(x, h)
        return h, h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = x.new_zeros(x.shape[1], HIDDEN)
        ys = scan(self.step, self.first(x), start)[1]
        last = scan(self.step, ys, start, outputs="last")[1]
        return self.head(last)


class OpCost(CostModel):
    """Every op takes as long, as small ops do."""

    def price(self, trace: Trace) -> PricedTrace:
        return price_by_signature(trace, lambda s: (0.0 if s.is_view else 5e-6, 0), source="ops", is_estimate=True)


def loss_of(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.square().mean()


def spec_of(model: nn.Module, batch: Any) -> StepSpec:
    return StepSpec(model=model, batch=batch, objective=Objective(loss=loss_of))


def planner_for(model: nn.Module, batch: Any, actions: tuple[str, ...] = ("recompute",)) -> Planner:
    return Planner(spec_of(model, batch), cost=OpCost(), actions=actions)


def make_model(**options: Any) -> tuple[Model, torch.Tensor]:
    torch.manual_seed(0)
    return Model(**options), torch.randn(T, BATCH, 4)


def plan_at(planner: Planner, budget_bytes: int) -> Plan:
    candidate = planner.fit(budget_bytes)
    assert candidate is not None
    return planner.plan(candidate, budget_bytes=budget_bytes, budget_text=str(budget_bytes), device="cpu")


@pytest.fixture(scope="module")
def planned() -> tuple[Model, torch.Tensor, Planner]:
    model, x = make_model()
    return model, x, planner_for(model, x)


# -- found ------------------------------------------------------------------------------------------------------------


def test_a_scan_is_found_with_what_its_steps_take(planned: tuple[Model, torch.Tensor, Planner]) -> None:
    _, _, planner = planned
    assert planner.scans is not None
    (ladder,) = planner.scans.ladders
    assert (ladder.path, ladder.call, ladder.scans) == ("trunk", 0, (0,))
    taped = planner.simulate(planner.scans.taped)
    assert taped.num_scan_evaluations == ALL_TAPED
    assert 4 * taped.recomputed_flops < planner.plain.recomputed_flops
    assert taped.peak_bytes > planner.plain.peak_bytes
    assert taped.step_seconds < planner.plain.step_seconds
    freed = [rung.freed_bytes for rung in ladder.rungs["save"]]
    assert freed == sorted(freed)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"chunk": 4}, {"slots": 3}, {"budget": "40%"}], ids=str)
def test_a_scan_with_a_schedule_of_its_own_keeps_it(options: dict[str, Any]) -> None:
    model, x = make_model(**options)
    planner = planner_for(model, x)
    assert planner.scans is None
    with apply_decisions(model, (Scan(path="trunk", index=0, budget_bytes=1 << 40),)) as applied:
        loss_of(model(x), x).backward()
    assert applied.log.num_scan_evaluations == 0
    assert model.trunk.report.evaluations > T


def test_a_model_without_a_scan_has_none() -> None:
    assert planner_for(nn.Linear(4, 4), torch.randn(2, 4)).scans is None


# -- chosen -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.75, 0.85, 0.95])
def test_a_planned_step_is_what_was_predicted(planned: tuple[Model, torch.Tensor, Planner], share: float) -> None:
    model, x, planner = planned
    assert planner.scans is not None
    budget_bytes = int(share * planner.simulate(planner.scans.taped).peak_bytes)
    plan = plan_at(planner, budget_bytes)
    assert any(isinstance(d, Scan) and d.index == 0 and d.path == "trunk" for d in plan.decisions)
    evidence = verify_plan(model, plan, x, objective=Objective(loss=loss_of), timed=False)
    assert evidence.gradients_equal and evidence.loss_equal
    assert evidence.within_budget
    assert evidence.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.01)
    assert evidence.num_scan_evaluations == plan.predicted.num_scan_evaluations >= T
    assert evidence.ok


def test_room_is_given_to_a_scan_that_takes_less_by_itself(planned: tuple[Model, torch.Tensor, Planner]) -> None:
    _, _, planner = planned
    assert planner.scans is not None
    taped = planner.simulate(planner.scans.taped)
    plan = plan_at(planner, 2 * taped.peak_bytes)
    assert plan.decisions == planner.scans.taped
    assert plan.predicted.extra_time_ratio < 0
    assert not any("nothing is changed" in note for note in plan.notes)


@pytest.mark.slow
def test_more_bytes_are_never_slower(planned: tuple[Model, torch.Tensor, Planner]) -> None:
    _, _, planner = planned
    assert planner.scans is not None
    top = planner.simulate(planner.scans.taped).peak_bytes
    found = [planner.fit(int(share * top)) for share in (0.5, 0.7, 0.85, 1.0)]
    seconds = [c.step_seconds for c in found if c is not None]
    assert len(seconds) == 4
    assert all(b <= 1.01 * a for a, b in itertools.pairwise(seconds))


@pytest.mark.slow
def test_too_small_a_budget_says_what_is_needed() -> None:
    model, x = make_model()
    planner = planner_for(model, x[:6])
    assert planner.fit(1000) is None
    error = planner.infeasible(1000)
    assert isinstance(error, InfeasibleBudget)
    least = planner.smallest()
    assert error.minimum_bytes == least.peak_bytes < planner.plain.peak_bytes
    assert any(isinstance(d, Scan) for d in least.decisions)


@pytest.mark.slow
def test_two_scans_of_one_call_and_one_inside_of_it() -> None:
    torch.manual_seed(0)
    model, x = TwoScans(), torch.randn(24, BATCH, FEATURES)
    planner = planner_for(model, x)
    assert planner.scans is not None
    named = {(d.path, d.index) for d in planner.scans.taped}
    assert named == {("first", 0), ("", 1), ("", 2)}
    taped = planner.simulate(planner.scans.taped)
    plan = plan_at(planner, int(0.7 * taped.peak_bytes))
    evidence = verify_plan(model, plan, x, objective=Objective(loss=loss_of), timed=False)
    assert evidence.ok and evidence.gradients_equal
    # In a capture a step that is taped and never used goes late: a step's tape in a loop of 24.
    assert 0.97 * plan.predicted.peak_bytes <= evidence.peak_bytes <= 1.001 * plan.predicted.peak_bytes
    assert "scan 1 of (the model)" in str(plan)


@pytest.mark.slow
def test_calls_of_one_module_are_told_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = Trunk(features=HIDDEN, outputs="stack")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.trunk(self.trunk(x))
            return out

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(T, BATCH, HIDDEN)
    planner = planner_for(model, x)
    assert planner.scans is not None
    assert [(d.path, d.call, d.index) for d in planner.scans.taped] == [("trunk", 0, 0), ("trunk", 1, 0)]
    plan = plan_at(planner, int(0.8 * planner.simulate(planner.scans.taped).peak_bytes))
    evidence = verify_plan(model, plan, x, objective=Objective(loss=loss_of), timed=False)
    assert evidence.evaluated_as_planned and evidence.within_budget and evidence.buffers_equal


@pytest.mark.slow
def test_on_meta_a_plan_is_made() -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        model, x = Model(), torch.empty(T, BATCH, 4)
    here, data = make_model()
    planner, known = planner_for(model, x), planner_for(here, data)
    assert planner.scans is not None and known.scans is not None
    assert planner.scans.taped == known.scans.taped
    budget_bytes = int(1.3 * known.plain.peak_bytes)
    assert plan_at(planner, budget_bytes).decisions == plan_at(known, budget_bytes).decisions


# -- applied ----------------------------------------------------------------------------------------------------------


def _evaluations(model: Model, x: torch.Tensor) -> int:
    loss_of(model(x), x).backward()
    return model.trunk.report.evaluations


def test_applied_undone_suspended_and_copied() -> None:
    model, x = make_model()
    plain = _evaluations(model, x)
    applied = apply_decisions(model, (Scan(path="trunk", index=0, budget_bytes=1 << 40),))
    assert _evaluations(model, x) == ALL_TAPED
    with applied.suspended():
        assert _evaluations(model, x) == plain
    with torch.no_grad():
        model(x)
    assert _evaluations(model, x) == ALL_TAPED
    applied.remove()
    assert _evaluations(model, x) == plain > ALL_TAPED


def test_a_larger_batch_than_the_plans_takes_what_it_needs() -> None:
    model, x = make_model()
    with apply_decisions(model, (Scan(path="trunk", index=0, budget_bytes=1000),)):
        assert _evaluations(model, torch.cat([x, x], dim=1)) > 2 * T  # one taped step at a time, and no error


@pytest.mark.slow
def test_a_scan_inside_of_a_scan_runs_by_its_own_schedule() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.report = ScanReport()

        def inner(self, h: torch.Tensor, x: None) -> tuple[torch.Tensor, None]:
            return torch.tanh(self.linear(h)), None

        def step(self, h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = scan(self.inner, None, h + x, length=4, outputs="none", report=self.report)[0]
            return h, h

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = scan(self.step, x, x.new_zeros(x.shape[1], 4), outputs="mean")[1]
            return out

    torch.manual_seed(0)
    model, x = Nested(), torch.randn(T, 3, 4)
    planner = planner_for(model, x)
    assert planner.scans is not None
    assert len(planner.scans.taped) == 1
    evidence = verify_plan(model, plan_at(planner, 1 << 40), x, objective=Objective(loss=loss_of), timed=False)
    assert evidence.gradients_equal and evidence.num_scan_evaluations == ALL_TAPED


# -- written and shown ------------------------------------------------------------------------------------------------


def test_round_trip_words_diff_and_exports(planned: tuple[Model, torch.Tensor, Planner], tmp_path: Path) -> None:
    _, _, planner = planned
    assert planner.scans is not None
    plan = plan_at(planner, int(0.85 * planner.simulate(planner.scans.taped).peak_bytes))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    decision = next(d for d in plan.decisions if isinstance(d, Scan))
    assert "recompute steps of the scan of trunk in" in str(plan)
    assert f"{plan.predicted.num_scan_evaluations} step evaluations" in str(plan)
    other = dataclasses.replace(plan, decisions=tuple(d for d in plan.decisions if not isinstance(d, Scan)))
    assert diff_plans(plan, other)["changes"]["trunk"][0].startswith("scan 0 in ")
    assert any("`trunk`" in sentence and "budget_bytes" in sentence for sentence in left_out(plan))
    with pytest.raises(UsageError, match="steps of scans only"):
        export_torch(dataclasses.replace(plan, decisions=(decision,)))


def test_the_module_tree_says_it(planned: tuple[Model, torch.Tensor, Planner]) -> None:
    _, _, planner = planned
    assert planner.scans is not None
    priced = planner.simulate_priced(planner.scans.taped)
    rows = {row.path: row for row in module_rows(planner.priced, priced, planner.scans.taped)}
    assert rows["trunk"].action.startswith("save, scan 0 in ") and rows["trunk"].is_decided
    assert not rows["encoder"].is_decided


def test_words_tell_scans_of_one_call_apart() -> None:
    scans = [Scan(path="a", index=i, budget_bytes=(i + 1) << 20) for i in range(2)]
    assert describe_decisions(scans)[:2] == [
        "recompute steps of scan 0 of a in 1.0 MiB",
        "recompute steps of scan 1 of a in 2.0 MiB",
    ]


@pytest.mark.slow
def test_explain_and_frontier() -> None:
    model, x = make_model()
    x, cost = x[:6], OpCost()
    curve = recoup.frontier(model, x, loss=loss_of, actions=("recompute",), cost=cost, num_points=3)
    assert curve.points[-1].extra_time_ratio < 0  # faster than the plain step, in more memory
    explained = curve.explain("95%")
    assert any("scan of trunk" in price.choice for price in explained.prices)


@pytest.mark.slow
def test_no_schedule_by_hand_is_faster() -> None:
    model, x = make_model()
    planner = planner_for(model, x)
    assert planner.scans is not None
    top = planner.simulate(planner.scans.taped).peak_bytes

    def plain(**options: Any) -> Any:
        return Simulator(spec_of(make_model(**options)[0], x), cost=OpCost()).plain

    measuring_seconds = plain(budget="200%").step_seconds - plain(chunk=T).step_seconds  # one step more, in each plan
    assert 0 < measuring_seconds < 2 * plain(chunk=T).step_seconds / T
    by_hand = [plain(chunk=c) for c in (1, 2, 3, 4, 5, 6, 8, T)]
    for share in (0.5, 0.7, 0.9):
        found = planner.fit(int(share * top))
        fitting = [c.step_seconds for c in by_hand if c.peak_bytes <= share * top]
        assert fitting and found is not None
        assert found.step_seconds - measuring_seconds <= 1.01 * min(fitting)


@pytest.mark.slow
def test_unroll_is_a_scan_too() -> None:
    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 8)
            self.v: Any = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            v = 0.9 * self.v + self.linear(x)
            self.v = v - (v > 1).float()
            return torch.sigmoid(4 * (v - 1))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.neurons = Spiking()
            self.head = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.neurons.v = 0.0
            return self.head(unroll(self.neurons, x, outputs="mean"))

    torch.manual_seed(0)
    model, x = Net(), torch.randn(T, 32, 4)
    planner = planner_for(model, x)
    assert planner.scans is not None
    plan = plan_at(planner, int(0.8 * planner.simulate(planner.scans.taped).peak_bytes))
    evidence = verify_plan(model, plan, x, objective=Objective(loss=loss_of), timed=False)
    assert evidence.gradients_equal and evidence.buffers_equal and evidence.evaluated_as_planned


# -- rungs ------------------------------------------------------------------------------------------------------------


def test_estimated_evaluations_are_near_the_optimum() -> None:
    for held, evaluations in evaluations_by_bytes(60, state_bytes=100, tape_bytes=400, in_row_bytes=400):
        best = tape_schedule(60, held // 100, state_units=1, tape_units=4).evaluations
        assert evaluations == pytest.approx(best, rel=0.12)
