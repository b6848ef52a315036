"""The solver against every choice there is, on small random problems."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.solver.frontier import Solver, solve
from recoup.solver.reference import evaluate, evaluate_line
from recoup.solver.sequence import Line
from recoup.solver.ways import Run

from .helpers import all_choices, random_problem

MOST_CHOICES = 6000


def curve_by_brute_force(line: Line) -> list[tuple[int, float]] | None:
    """Returns the exact (peak, seconds) curve, None if there are too many choices to go through."""
    choices = list(itertools.islice(all_choices(line), MOST_CHOICES + 1))
    if len(choices) > MOST_CHOICES:
        return None
    priced = sorted(evaluate_line(line, choice)[:2] for choice in choices)
    curve: list[tuple[int, float]] = []
    for peak, seconds in priced:
        if not curve or seconds < curve[-1][1] - 1e-9:
            curve.append((peak, seconds))
    return curve


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9), num_blocks=st.integers(1, 8), group_share=st.sampled_from([0.0, 0.2, 0.4]))
def test_every_budget_is_solved_exactly(seed: int, num_blocks: int, group_share: float) -> None:
    problem = random_problem(seed, num_blocks=num_blocks, group_share=group_share)
    curve = curve_by_brute_force(Line(problem))
    if curve is None:
        return
    solver = Solver(problem)
    assert solver.leanest().peak_bytes == curve[0][0]
    for peak, seconds in curve:
        solution = solver.solve(peak)
        assert solution.status == "optimal"
        assert solution.peak_bytes <= peak
        assert solution.extra_seconds == pytest.approx(seconds, abs=1e-7)
    assert solver.solve(curve[0][0] - 1).status == "infeasible"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9))
def test_the_fronts_numbers_are_those_of_evaluate(seed: int) -> None:
    problem = random_problem(seed, num_blocks=8)
    solver = Solver(problem)
    front = solver._front
    for point in range(0, len(front.peaks), max(len(front.peaks) // 10, 1)):
        solution = solver._at(point)
        own_peak = max(problem.fixed_bytes + int(front.peaks[point]), problem.optimizer_peak_bytes)
        assert solution.peak_bytes == own_peak
        assert solution.extra_seconds == pytest.approx(float(front.seconds[point]), abs=1e-7)
        assert evaluate(problem, solution.choice) == (
            solution.peak_bytes,
            solution.extra_seconds,
            solution.extra_flops,
        )


def test_infeasible_returns_the_leanest_choice() -> None:
    problem = random_problem(3)
    smallest = Solver(problem).leanest()
    answer = solve(problem, smallest.peak_bytes - 1)
    assert answer.status == "infeasible"
    assert answer.choice == smallest.choice
    assert solve(problem, smallest.peak_bytes).status == "optimal"


def test_plain_is_the_answer_where_it_fits() -> None:
    problem = random_problem(5)
    solution = solve(problem, 10**9)
    assert {pick.way for pick in solution.choice} == {Run("save")}
    assert solution.extra_seconds == 0.0
