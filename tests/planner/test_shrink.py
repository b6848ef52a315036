"""The smallest plan: what a solver takes for a little more than its leanest may simulate as less."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from recoup.planner.incumbents import Allowance, Incumbents
from recoup.planner.strategies.recompute import RecomputeStrategy
from tests.planner.fake import FakeJudge, candidate, regions

ESTIMATES = {1: 100_000, 2: 100_700, 3: 108_000}  # bytes of plans with as many regions, by the solver
SIMULATED = {1: 99, 2: 97, 3: 96}


def solution(budget_bytes: int) -> Any:
    num = max((n for n, nbytes in ESTIMATES.items() if nbytes <= budget_bytes), default=1)
    return SimpleNamespace(choice=num, peak_bytes=ESTIMATES[num])


def proposed(num_ops: int) -> list[int]:
    judge = FakeJudge()
    for num, peak_bytes in SIMULATED.items():
        judge.simulated[regions(num)] = candidate(regions(num), peak_bytes, 10.0)
    solver = SimpleNamespace(leanest=lambda: solution(0), solve=solution)
    view = SimpleNamespace(solver=solver, decide=regions)
    step = SimpleNamespace(
        views=SimpleNamespace(plain=SimpleNamespace(views=[view])),
        allowance=lambda incumbents: Allowance(num_ops=num_ops, began_at=0),
    )
    incumbents = Incumbents(judge)
    strategy = RecomputeStrategy(step)  # type: ignore[arg-type]  # the part of a step that it asks
    found = []
    proposals = strategy.shrink(incumbents)
    try:
        decisions = next(proposals)
        while True:
            found.append(len(decisions))
            decisions = proposals.send(judge.simulate(decisions))
    except StopIteration:
        return found


def test_what_is_estimated_a_little_higher_is_tried_too() -> None:
    assert proposed(num_ops=100) == [1, 2]


def test_without_effort_only_the_leanest_is() -> None:
    assert proposed(num_ops=0) == [1]
