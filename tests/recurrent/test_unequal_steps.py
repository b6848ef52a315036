"""Schedules for steps of unequal cost: by brute force, beside the ones that take all steps as equal, and executed."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from recoup.errors import UsageError
from recoup.recurrent import ScanReport, scan
from recoup.recurrent.schedules import weighted
from recoup.recurrent.schedules.actions import simulate
from recoup.recurrent.schedules.tapes import tape_schedule
from recoup.recurrent.schedules.treeverse import treeverse_schedule
from recoup.recurrent.schedules.weighted import weighted_tapes, weighted_treeverse
from tests.recurrent.helpers import NETWORKS, differing, train_once


def _costs(num_steps: int, seed: int = 0) -> list[float]:
    chosen = random.Random(seed)
    return [float(chosen.choice((1, 1, 2, 5, 20))) for _ in range(num_steps)]


def _least(costs: list[float], units: int, state: int, tape: int, end: int, keeps: bool) -> float:
    """The recurrence by recursion, without tables. `units`: free besides the start state."""
    sums = [0.0, *itertools.accumulate(costs)]

    @functools.cache
    def f(i: int, j: int, m: int, follows: bool) -> float:
        if m < 0:
            return float("inf")
        if i == j:
            return 0.0 if m >= end or not follows else float("inf")
        on = costs[i] + f(i + 1, j, m - tape, True) if keeps else float("inf")
        if follows:
            return min(on, f(i, j, m - end, False))
        if not keeps and j - i == 1:
            return costs[i]
        back = sums[j] - sums[i] + f(i, j - 1, m, False) if j - i > 1 else float("inf")
        splits = [sums[k] - sums[i] + f(k, j, m - state, False) + f(i, k, m, False) for k in range(i + 1, j)]
        return min(on, back, *splits)

    return f(0, len(costs), units, False)


@pytest.mark.parametrize("seed", range(4))
def test_treeverse_is_optimal(seed: int) -> None:
    for num_steps in (1, 2, 7, 19):
        costs = _costs(num_steps, seed)
        for slots in (1, 2, 3, 5):
            schedule = weighted_treeverse(costs, slots)
            found = simulate(schedule.actions(), num_steps, step_costs=costs)
            assert found.weighted == _least(costs, min(slots, num_steps) - 1, 1, 0, 0, False)
            assert found.peak_states <= slots
            assert found.evaluations == schedule.evaluations


@pytest.mark.parametrize("sizes", [(1, 1, 0), (1, 2, 1), (3, 2, 0), (2, 3, 2)])
def test_states_or_tapes_are_optimal(sizes: tuple[int, int, int]) -> None:
    state, tape, end = sizes
    options = {"state_units": state, "tape_units": tape, "end_units": end}
    for num_steps in (1, 2, 9, 15):
        costs = _costs(num_steps, sum(sizes))
        for units in (tape + end, tape + end + state, 11, 17):
            schedule = weighted_tapes(costs, units, **options)
            found = simulate(schedule.actions(), num_steps, step_costs=costs, **options)
            assert found.weighted == _least(costs, units, state, tape, end, True)
            assert found.peak_units <= units
    with pytest.raises(ValueError, match="do not hold"):
        weighted_tapes([1.0], tape + end - 1, **options)


def test_equal_steps_get_the_published_optimum() -> None:
    for slots in (2, 3, 6):
        assert weighted_treeverse([1.0] * 64, slots).evaluations == treeverse_schedule(64, slots).evaluations
    for units in (5, 12, 30):
        options = {"state_units": 1, "tape_units": 3}
        found = weighted_tapes([1.0] * 60, units, **options)
        assert found.evaluations == tape_schedule(60, units, **options).evaluations


@pytest.mark.parametrize("num_steps", [200, 1000])
def test_long_loops_cost_less_than_by_count(num_steps: int) -> None:
    """A tenth of the steps, in two stretches, cost twenty times as much."""
    costs = [20.0 if t % (num_steps // 2) < num_steps // 20 else 1.0 for t in range(num_steps)]
    options = {"state_units": 1, "tape_units": 2}
    pairs = [
        (weighted_treeverse(costs, 6), treeverse_schedule(num_steps, 6)),
        (weighted_tapes(costs, 40, **options), tape_schedule(num_steps, 40, **options)),
    ]
    for ours, equal in pairs:
        found = simulate(ours.actions(), num_steps, step_costs=costs, state_units=1, tape_units=2)
        by_count = simulate(equal.actions(), num_steps, step_costs=costs)
        assert found.weighted < 0.9 * by_count.weighted
        assert found.weighted == weighted.total_cost(ours, tuple(costs))
    assert found.peak_units <= 40


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"slots": 3}, {"budget": "60%"}, {"chunk": 4}], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_scan_is_exact(name: str, options: dict[str, Any]) -> None:
    kind, sizes = NETWORKS[name]
    torch.manual_seed(0)
    network = kind()
    expected, _ = train_once(network, sizes, 25, None)
    found, report = train_once(network, sizes, 25, options | {"costs": _costs(25)})
    assert differing(expected, found) == []
    assert report.evaluations == report.predicted_evaluations
    assert ("unequal" in report.schedule) == ("chunk" not in options)


def test_expensive_steps_are_evaluated_less_often() -> None:
    evaluated = np.zeros(30, dtype=np.int64)
    cell, costs = nn.GRUCell(3, 4), [1.0] * 30
    costs[10:13] = [50.0] * 3

    def step(state: Any, x: torch.Tensor) -> Any:
        evaluated[int(x[0, 0])] += 1
        state = cell(x, state)
        return state, state.sum()

    def counts(options: dict[str, Any]) -> tuple[int, int]:
        evaluated[:] = 0
        x = torch.arange(30.0).view(30, 1, 1).expand(30, 2, 3)
        scan(step, x, torch.zeros(2, 4), slots=3, outputs="sum", **options)[1].sum().backward()
        return int(evaluated[10:13].sum()), int(evaluated.sum())

    report = ScanReport()
    ours, equal = counts({"costs": costs, "report": report}), counts({})
    assert ours[0] < equal[0]
    assert ours[1] == report.predicted_evaluations >= equal[1]


@pytest.mark.parametrize("costs", [[1.0] * 5, [1.0] * 5 + [0.0], [1.0] * 5 + [float("nan")], "abcdef", [[1.0]] * 6])
def test_other_costs_are_refused(costs: Any) -> None:
    with pytest.raises(UsageError, match="costs"):
        scan(lambda h, x: (h + x, h), torch.ones(6, 2), torch.zeros(2), costs=costs)


def test_the_measured_step_is_counted_again_wherever_it_is_taped_first() -> None:
    """A schedule may save the first state and tape the steps after it, the measured one among them."""
    kind, sizes = NETWORKS["lif"]
    costs, seen = [3.0, 9.0, 9.0, 3.0, 1.0, 9.0, 3.0, 1.0], set()
    for share in range(40, 100, 6):
        _, report = train_once(kind(), sizes, 8, {"budget": f"{share}%", "costs": costs}, "last")
        assert report.evaluations == report.predicted_evaluations
        seen.add(report.evaluations)
    assert len(seen) > 3
