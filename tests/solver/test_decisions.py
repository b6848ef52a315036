"""A plan's decisions say what the choice says, and no more than needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.ir.decision import Decision, Recompute, Rederive
from recoup.solver.decisions import decisions
from recoup.solver.frontier import Solver
from recoup.solver.problem import Leaf
from recoup.solver.reference import uniform
from recoup.solver.sequence import Call, Choice, Line, Pick
from recoup.solver.ways import Replay, Run

from .helpers import random_chain, random_problem

_Regions = set[tuple[str, tuple[str, ...], tuple[str, ...]]]


def read_back(line: Line, plan: tuple[Decision, ...]) -> tuple[dict[int, str], _Regions]:
    """Returns the action of every leaf with a choice, and every region, by the rules of `Decision`."""
    by_call: dict[tuple[str, int | None], list[Decision]] = {}
    for d in plan:
        by_call.setdefault((d.path, d.call), []).append(d)
    actions: dict[int, str] = {}
    regions: _Regions = set()

    def walk(call: Call, action: str) -> None:
        at = call.first
        members: dict[str, str] = {}
        for part in call.parts:
            if isinstance(part, Leaf):
                if len(part.options) > 1:
                    actions[at] = action
                at += 1
                continue
            inherited = members.pop(part.block.path, action)
            own = inherited
            for decision in by_call.get((part.block.path, part.block.call), ()):  # regions, the outermost first
                if isinstance(decision, Recompute):
                    own = decision.inside
                    regions.add((decision.path, decision.span, decision.keep))
                    members |= dict.fromkeys(decision.span, own)
                else:
                    own = decision.action
            walk(part, own)
            at = part.last

    # Leaves beside the model (the loss) follow the decision for the model itself.
    root = by_call.get(("", 0))
    walk(line.root, root[0].action if root is not None else "save")
    return actions, regions


def wanted(line: Line, choice: Choice) -> tuple[dict[int, str], _Regions]:
    """Returns the same of a choice."""
    actions: dict[int, str] = {}
    regions: _Regions = set()

    def walk(picks: Choice, start: int) -> None:
        for pick in picks:
            first = start + pick.first
            if pick.num_calls:
                calls = line.calls(first, pick.rank, pick.num_calls)
                assert isinstance(pick.way, Replay)
                regions.add((calls[0].block.path, tuple(c.block.path for c in calls[1:]), pick.way.keep))
                walk(pick.inner, first)
            elif len(line.leaves[first].options) > 1:
                assert isinstance(pick.way, Run)
                actions[first] = pick.way.ambient

    walk(choice, 0)
    return actions, regions


@settings(max_examples=120, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9), group_share=st.sampled_from([0.0, 0.3]))
def test_decisions_say_what_the_choice_says(seed: int, group_share: float) -> None:
    problem = random_problem(seed, num_blocks=8, group_share=group_share)
    solver = Solver(problem)
    for solution in solver.frontier(6):
        plan = decisions(problem, solution.choice)
        assert read_back(solver.line, plan) == wanted(solver.line, solution.choice)


def test_the_plain_step_needs_no_decision() -> None:
    problem = random_problem(1)
    assert decisions(problem, Solver(problem).solve(10**12).choice) == ()


def test_one_decision_rederives_everything() -> None:
    problem = random_problem(7, num_blocks=6)
    line = Line(problem)
    choice = uniform(line, 0, len(line.leaves), "rederive")
    assert decisions(problem, choice) == (Rederive(path="", call=0),)


@pytest.mark.parametrize("num_stages", [6, 9])
def test_a_region_is_one_decision(num_stages: int) -> None:
    problem = random_chain(4, num_stages)
    for solution in Solver(problem).frontier(12):
        plan = decisions(problem, solution.choice)
        covered = [path for d in plan for path in d.paths]
        chosen = list(all_regions(solution.choice))
        assert len(plan) == len(chosen)
        assert len(covered) == sum(pick.num_calls for pick in chosen)


def all_regions(choice: Choice) -> Iterator[Pick]:
    for pick in choice:
        if isinstance(pick.way, Replay):
            yield pick
            yield from all_regions(pick.inner)
