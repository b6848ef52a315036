"""Whole curves: monotone, never beaten by a baseline, and fast on large problems."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.solver import search as search_module
from recoup.solver.baselines import baselines
from recoup.solver.frontier import ACTIONS, Solver, frontier, solve
from recoup.solver.pareto import Front, RegionStep, before_region, regions_within
from recoup.solver.problem import Block, Problem
from recoup.solver.reference import evaluate
from recoup.solver.search import Search
from recoup.solver.sequence import Line
from recoup.solver.ways import Run

from .helpers import random_chain, random_leaf, random_problem, random_region, repeat


def equal_layers(num_layers: int, *, num_leaves: int) -> Problem:
    """Returns equal chained layers of two calls each, a third of the leaves with a choice, as transformers have it."""
    rng = random.Random(0)
    halves = tuple(
        Block(
            path=f".{name}",
            call=0,
            kind=name,
            parts=tuple(random_leaf(rng, (f".{name}.{i}", 0), rederive_share=0.33) for i in range(num_leaves // 2)),
            region=random_region(rng, 4.0),
        )
        for name in ("attention", "mlp")
    )
    return repeat(
        Block(path="", call=0, kind="Layer", parts=halves, region=random_region(rng, 9.0), chained=True), num_layers
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9))
def test_more_bytes_are_never_slower(seed: int) -> None:
    problem = random_problem(seed, num_blocks=8)
    solver = Solver(problem)
    low, high = solver.leanest().peak_bytes, solver.solve(10**12).peak_bytes
    answers = [solver.solve(low + (high - low) * i // 39) for i in range(40)]
    for lean, rich in itertools.pairwise(answers):
        assert rich.extra_seconds <= lean.extra_seconds + 1e-9
    curve = solver.frontier(40)
    for lean, rich in itertools.pairwise(curve):
        assert lean.peak_bytes < rich.peak_bytes
        assert lean.extra_seconds > rich.extra_seconds
    assert curve[-1].extra_seconds == 0.0


def test_points_that_are_left_out_early_change_no_front(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [Line(random_problem(0, num_blocks=8)), Line(random_chain(0, 24)), Line(equal_layers(16, num_leaves=20))]
    num_points = 0

    def fronts(within: Callable[[Sequence[RegionStep], Front], list[Front]]) -> list[tuple[list[int], list[float]]]:
        def counting(steps: Sequence[RegionStep], rival: Front) -> list[Front]:
            nonlocal num_points
            made = within(steps, rival)
            num_points += sum(len(front.peaks) for front in made)
            return made

        monkeypatch.setattr(search_module, "regions_within", counting)
        found = [Search(line, actions=ACTIONS, spans=True, nested_spans=True).front() for line in lines]
        return [(f.peaks.tolist(), f.seconds.tolist()) for f in found]

    few, num_few = fronts(regions_within), num_points
    every = fronts(lambda steps, rival: [before_region(step) for step in steps])
    assert few == every
    assert num_few < num_points - num_few


def test_plans_by_hand_need_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(0, num_blocks=8)
    by_hand = [baseline[:2] for baseline in Solver(problem).baselines]
    assert by_hand
    monkeypatch.setattr(Search, "front", None)
    assert [baseline[:2] for baseline in Solver(problem).baselines] == by_hand


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9))
def test_no_baseline_is_faster(seed: int) -> None:
    for problem in (random_problem(seed, num_blocks=8), random_chain(seed, 12)):
        solver = Solver(problem)
        low, high = solver.leanest().peak_bytes, solver.solve(10**12).peak_bytes
        by_hand = baselines(problem)
        for i in range(11):
            budget = low + (high - low) * i // 10
            solution = solver.solve(budget)
            assert solution.peak_bytes <= budget
            assert solution.status == "optimal"
            for baseline in by_hand:
                if baseline.peak_bytes <= budget:
                    assert solution.extra_seconds <= baseline.extra_seconds + 1e-9


def test_actions_are_obeyed() -> None:
    problem = equal_layers(4, num_leaves=8)
    floor = Solver(problem).leanest().peak_bytes
    answers = {actions: solve(problem, floor, actions=actions) for actions in [(), ("rederive",), ("recompute",)]}
    assert {pick.way for pick in answers[()].choice} == {Run("save")}
    assert all(isinstance(pick.way, Run) for pick in answers["rederive",].choice)
    for pick in answers["recompute",].choice:
        assert pick.way != Run("rederive")
        assert all(inner.way != Run("rederive") for inner in pick.inner)
    longest = {pick.num_calls for pick in solve(problem, floor, spans=False).choice}
    assert max(longest) <= 1


def test_the_optimizer_step_can_set_the_peak() -> None:
    problem = random_chain(1, 6)
    heavy = Problem(parts=problem.parts, fixed_bytes=0, optimizer_peak_bytes=10**9, plain_seconds=1.0, plain_flops=1)
    assert solve(heavy, 10**9).extra_seconds == 0.0
    assert solve(heavy, 10**9 - 1).status == "infeasible"
    assert [s.peak_bytes for s in frontier(heavy)] == [10**9]


# What a solve calls is the same on every machine: 51,359, 142,685 and 393,556 in November 2026.
@pytest.mark.parametrize(
    ("problem", "most_calls"),
    [
        (equal_layers(32, num_leaves=20), 56_000),
        (equal_layers(80, num_leaves=20), 155_000),
        (random_chain(1, 80), 430_000),
    ],
    ids=["32 equal layers of 20 leaves", "80 equal layers of 20 leaves", "a chain of 80 different stages"],
)
def test_large_problems_take_few_calls(problem: Problem, most_calls: int) -> None:
    num_calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_calls
        num_calls += event == "call" and "/recoup/solver/" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        solver = Solver(problem)
        low, high = solver.leanest().peak_bytes, solver.solve(10**12).peak_bytes
        solution = solver.solve((low + high) // 2)
    finally:
        sys.setprofile(None)
    assert solution.status == "optimal"
    assert num_calls <= most_calls


@pytest.mark.slow
def test_a_thousand_layers() -> None:
    problem = equal_layers(1000, num_leaves=2)
    solver = Solver(problem)
    low, high = solver.leanest().peak_bytes, solver.solve(10**12).peak_bytes
    solution = solver.solve((low + high) // 2)
    assert solution.peak_bytes <= (low + high) // 2
    assert evaluate(problem, solution.choice)[0] == solution.peak_bytes


def test_thinning_costs_little() -> None:
    """Bytes and seconds without a common grid make fronts grow; what is left of them loses under 0.5 %."""
    problem = without_grid(random_chain(7, 120), seed=7)
    line = Line(problem)
    coarse, fine = (
        Search(line, actions=ACTIONS, spans=True, nested_spans=False, max_points=points).front()
        for points in (4000, 40_000)
    )
    assert len(fine.peaks) > len(coarse.peaks)  # something was thinned
    assert coarse.peaks[0] == fine.peaks[0]
    for i in range(40):
        room = int(fine.peaks[0] + (fine.peaks[-1] - fine.peaks[0]) * i // 40)
        exact = fine.seconds[fine.peaks.searchsorted(room, side="right") - 1]
        assert coarse.seconds[coarse.peaks.searchsorted(room, side="right") - 1] <= 1.005 * exact


def without_grid(problem: Problem, *, seed: int) -> Problem:
    """Returns a chain whose bytes are no multiples of anything, each stage with a leaf that has two options."""
    rng = random.Random(seed)
    root = problem.parts[0]
    assert isinstance(root, Block)
    blocks = []
    for block in root.parts:
        assert isinstance(block, Block)
        leaf = random_leaf(rng, (block.path, 0), rederive_share=1.0)
        options = tuple(
            dataclasses.replace(
                option,
                saved_bytes=option.saved_bytes * 3 + rng.randrange(1000),
                forward_bytes=option.forward_bytes * 3 + 1000,
                backward_bytes=option.backward_bytes * 3 + 1000,
                extra_seconds=option.extra_seconds * rng.random(),
            )
            for option in leaf.options
        )
        blocks.append(dataclasses.replace(block, parts=(dataclasses.replace(leaf, options=options),)))
    return dataclasses.replace(problem, parts=(dataclasses.replace(root, parts=tuple(blocks)),))
