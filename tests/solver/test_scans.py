"""Scans in the solver's problem: rungs among options, the best of them found, the decisions they become."""

from __future__ import annotations

import itertools

import pytest

from recoup.ir.decision import Recompute, Scan, TileLoss
from recoup.solver.frontier import Solver
from recoup.solver.problem import Block, Leaf, Option, Problem
from recoup.solver.reference import evaluate
from recoup.solver.scans import Ladder, Rung, chosen_bytes, merged, split_scans, under, with_rungs, with_scans
from recoup.solver.sequence import Pick
from recoup.solver.ways import Run, RungOf


def ladder(path: str, number: int, sizes: tuple[int, ...] = (600, 300, 100)) -> Ladder:
    """A scan of 1000 bytes with all steps taped, whose evaluations cost more the fewer bytes it has."""
    rungs = tuple(Rung(scan_bytes=(b,), freed_bytes=1000 - b, seconds=(1000 / b - 1) * (1 + number / 4)) for b in sizes)
    return Ladder(
        path=path,
        call=0,
        scans=(number,),
        first_ops=(number,),
        taped_bytes=(1100,),
        needed_bytes=(1000,),
        rungs={"save": rungs, "rederive": rungs[1:]},
    )


LADDERS = (ladder("", 0), ladder("", 1))


def scan_leaf(which: int, *, derives: bool = True) -> Leaf:
    options = [Option(ambient="save", saved_bytes=1000, forward_bytes=1050, backward_bytes=1200, extra_seconds=0.0)]
    if derives:
        options.append(
            Option(ambient="rederive", saved_bytes=700, forward_bytes=1050, backward_bytes=1200, extra_seconds=0.5)
        )
    return Leaf(owner=("", 0), options=with_rungs(options, LADDERS, which))


def problem(*, derives: bool = True) -> Problem:
    other = Leaf(
        owner=("block", 0),
        options=(
            Option(ambient="save", saved_bytes=400, forward_bytes=400, backward_bytes=500, extra_seconds=0.0),
            Option(ambient="rederive", saved_bytes=100, forward_bytes=400, backward_bytes=500, extra_seconds=0.7),
        ),
    )
    block = Block(path="block", call=0, kind="Linear", parts=(other,), region=None)
    root = Block(
        path="",
        call=0,
        kind="Net",
        parts=(scan_leaf(0, derives=derives), block, scan_leaf(1, derives=derives)),
        region=None,
    )
    return Problem(parts=(root,), fixed_bytes=0, optimizer_peak_bytes=0, plain_seconds=10.0, plain_flops=0)


def test_rungs_are_options_behind_their_action() -> None:
    leaf = scan_leaf(1)
    assert [Run(o.ambient, o.rung) for o in leaf.options] == [
        Run("save"),
        *(Run("save", RungOf(ladder=1, number=i)) for i in range(3)),
        Run("rederive"),
        *(Run("rederive", RungOf(ladder=1, number=i)) for i in range(2)),
    ]
    first = leaf.options[1]
    assert (first.saved_bytes, first.forward_bytes, first.backward_bytes) == (600, 650, 800)


@pytest.mark.parametrize("action", ["save", "rederive"])
def test_the_solver_finds_the_best_rungs(action: str) -> None:
    narrowed = under(problem(), LADDERS, action)
    solver = Solver(narrowed, actions=("rederive",))
    leaves = solver.line.leaves
    every = []
    for options in itertools.product(*(leaf.options for leaf in leaves)):
        choice = tuple(Pick(first=i, last=i + 1, way=Run(o.ambient, o.rung)) for i, o in enumerate(options))
        every.append(evaluate(narrowed, choice)[:2])
    for budget_bytes in range(700, 3000, 100):
        fitting = [seconds for peak, seconds in every if peak <= budget_bytes]
        solution = solver.solve(budget_bytes)
        if fitting:
            assert solution.status == "optimal"
            assert solution.extra_seconds == pytest.approx(min(fitting))
        else:
            assert solution.status == "infeasible"


def test_a_choice_says_the_bytes() -> None:
    choice = (
        Pick(first=0, last=1, way=Run("save", RungOf(ladder=0, number=1))),
        Pick(first=1, last=2, way=Run("rederive")),
        Pick(first=2, last=3, way=Run("save")),
    )
    assert list(chosen_bytes(choice, LADDERS)) == [(300,), (1100,)]
    assert LADDERS[0].decisions((300,)) == (Scan(path="", call=0, index=0, budget_bytes=300),)


def test_scans_together_give_up_the_cheapest_bytes_first() -> None:
    first = Rung(scan_bytes=(1000,), freed_bytes=0, seconds=0.0)
    cheap = (first, Rung(scan_bytes=(500,), freed_bytes=500, seconds=1.0))
    dear = (first, Rung(scan_bytes=(500,), freed_bytes=500, seconds=3.0))
    assert [rung.scan_bytes for rung in merged([dear, cheap])] == [(1000, 500), (500, 500)]
    humped = (first, Rung(scan_bytes=(900,), freed_bytes=100, seconds=0.9), cheap[1])
    assert [rung.scan_bytes for rung in merged([dear, humped])] == [(1000, 900), (1000, 500), (500, 500)]


def test_other_bytes_for_the_same_plan() -> None:
    tile = TileLoss(path="head")
    region = Recompute(path="a")
    scans = LADDERS[0].decisions((300,))
    plan = with_scans((region, tile), scans)
    assert plan == (region, *scans, tile)
    assert split_scans(plan) == (scans, (region, tile))
    assert with_scans(plan, LADDERS[0].decisions((200,)))[1].budget_bytes == 200
