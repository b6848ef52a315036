"""The smallest plan: what a solver takes for a little more than its leanest may simulate as less."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from recoup.planner.incumbents import Allowance, Incumbents
from recoup.planner.step import PlannedStep
from recoup.planner.strategies.recompute import RecomputeStrategy
from recoup.thresholds import MOST_TRIES
from tests.planner.fake import FakeJudge, candidate, regions

ESTIMATES = {1: 100_000, 2: 100_700, 3: 108_000}  # bytes of plans with as many regions, by the solver
SIMULATED = {1: 99_000, 2: 97_000, 3: 96_000}


def proposed(
    num_ops: int,
    estimates: dict[int, int] = ESTIMATES,
    simulated: dict[int, int] = SIMULATED,
    *,
    known_bytes: int = 200_000,
    shares: dict[str, float] | None = None,
) -> list[int]:
    """Returns the numbers of regions of the plans that are proposed.

    Args:
        known_bytes: the smallest peak before. shares: of its estimate that the view's leanest plan took before.
    """

    def solution(budget_bytes: int) -> Any:
        num = max((n for n, nbytes in estimates.items() if nbytes <= budget_bytes), default=1)
        return SimpleNamespace(choice=num, peak_bytes=estimates[num])

    judge = FakeJudge()
    judge.plain = candidate((), known_bytes, 10.0)
    solver = SimpleNamespace(leanest=lambda: solution(0), solve=solution)
    view = SimpleNamespace(name="all", solver=solver, decide=regions, fixed_bytes=0)
    step: Any = SimpleNamespace(
        shares=shares or {},
        leanest_of=lambda views, incumbents: PlannedStep.leanest_of(step, views, incumbents),
        views=SimpleNamespace(based=SimpleNamespace(views=[view])),
        allowance=lambda incumbents: Allowance(num_ops=num_ops, began_at=0),
    )
    incumbents = Incumbents(judge)
    strategy = RecomputeStrategy(step)  # the part of a step that it asks
    found = []
    proposals = strategy.shrink(incumbents)
    try:
        decisions = next(proposals)
        while True:
            found.append(len(decisions))
            judge.simulated[decisions] = candidate(decisions, simulated[len(decisions)], 10.0)
            decisions = proposals.send(judge.simulate(decisions))
    except StopIteration:
        return found


def test_what_is_estimated_a_little_higher_is_tried_too() -> None:
    assert proposed(num_ops=100) == [1, 2]


def test_without_effort_only_the_leanest_is() -> None:
    assert proposed(num_ops=0) == [1]


def test_a_view_is_left_once_its_peaks_only_rise() -> None:
    estimates = {num: 100_000 + 300 * num for num in range(1, 15)}  # each is the answer to a target of its own
    rising = dict(zip(estimates, (99_000, 98_000, 97_000, *range(100_000, 111_000, 1000)), strict=True))
    assert proposed(1_000, estimates, rising) == list(range(1, 4 + MOST_TRIES))
    falling = {num: 1000 * (99 - num // 3) for num in estimates}
    assert proposed(1_000, estimates, falling) == list(estimates)


def test_where_estimates_hold_no_other_plan_is_tried() -> None:
    assert proposed(1_000, simulated=ESTIMATES) == [1]
    near = {1: 100_000, 2: 100_150, 3: 100_700}  # the second is so near that it may be the smallest all the same
    assert proposed(1_000, near, near) == [1, 2]


def test_a_view_far_above_the_smallest_peak_is_left_out() -> None:
    assert proposed(1_000, known_bytes=96_000) == [1]  # estimates may be off by as much
    assert proposed(1_000, known_bytes=95_000) == []
    assert proposed(1_000, known_bytes=95_000, shares={"all": 0.99}) == [1]  # this view's was
