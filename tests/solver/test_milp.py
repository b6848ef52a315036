"""The solver against an exact mixed-integer programme (HiGHS) on steps of up to 24 leaves.

Checkmate's idea (arXiv 1910.02653) over this project's action set: a binary for every leaf option and every region
and span (a path through the line), and for every leaf option inside each of those. Levels are linear in them, so each
peak is one row: what is saved before, plus the peak where it is taken, is at most the budget.
"""

from __future__ import annotations

import random

import pytest

from recoup.solver.frontier import Solver
from recoup.solver.problem import Block, Leaf, Problem, Region
from recoup.solver.sequence import combine, results_kept

from .helpers import random_leaf, random_region

highspy = pytest.importorskip("highspy")


def chain_of_blocks(seed: int, num_blocks: int, leaves_each: int) -> Problem:
    """Returns chained blocks of leaves that choose on their own."""
    rng = random.Random(seed)
    blocks = tuple(
        Block(
            path=str(i),
            call=0,
            kind="Block",
            parts=tuple(random_leaf(rng, (f"{i}.{k}", 0)) for k in range(leaves_each)),
            region=random_region(rng, rng.uniform(2.0, 9.0)),
            chained=i > 0,
        )
        for i in range(num_blocks)
    )
    return Problem(parts=blocks, fixed_bytes=0, optimizer_peak_bytes=0, plain_seconds=1.0, plain_flops=1)


def milp_seconds(problem: Problem, budget_bytes: int) -> float | None:
    """Returns the least extra seconds within the budget, None if there is no choice."""
    blocks = [part for part in problem.parts if isinstance(part, Block)]
    leaves = [(b, part) for b, block in enumerate(blocks) for part in block.parts if isinstance(part, Leaf)]
    starts = [next(i for i, (b, _) in enumerate(leaves) if b == block) for block in range(len(blocks))] + [len(leaves)]
    gradients = [leaf.gradient_bytes for _, leaf in leaves]
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("mip_rel_gap", 0.0)
    edges: list[tuple[int, int, int, object]] = []  # from, to, saved bytes, variable
    peaks: list[tuple[int, int, object]] = []  # from, peak above the level there, variable
    cost = []
    for i, (_, leaf) in enumerate(leaves):
        for option in leaf.options:
            x = model.addBinary()
            edges.append((i, i + 1, option.saved_bytes, x))
            peak = max(option.forward_bytes, option.backward_bytes + sum(gradients[i + 1 :]))
            peaks.append((i, peak, x))
            cost.append(option.extra_seconds * x)
    inner_rows = []
    ways: list[tuple[int, int, Region]] = []
    for first in range(len(blocks)):
        for last in range(first + 1, len(blocks) + 1):
            combined = combine([b.region for b in blocks[first:last] if b.region is not None])
            if combined.is_alone:
                regions = [combined, *(results_kept(combined, keep) for keep in combined.keeps)]
                ways += [(first, last, region) for region in regions]
    for first, last, region in ways:
        low, high = starts[first], starts[last]
        x = model.addBinary()
        edges.append((low, high, region.saved_bytes, x))
        peaks.append((low, region.forward_bytes, x))
        cost.append(region.seconds * x)
        taken = region.saved_bytes + region.replay_bytes + sum(gradients[high:])
        level = []
        for i in range(low, high):
            chosen = []
            before = list(level)
            for option in leaves[i][1].options:
                y = model.addBinary()
                chosen.append((y, option))
                peak = max(option.forward_bytes, option.backward_bytes + sum(gradients[i + 1 : high]))
                inner_rows.append((low, taken * x + sum(before) + peak * y))
                cost.append(option.extra_seconds * y)
                level.append(option.saved_bytes * y)
            model.addConstr(sum(y for y, _ in chosen) == x)
    for position in range(len(leaves) + 1):
        out = sum(x for a, _, _, x in edges if a == position)
        into = sum(x for _, b, _, x in edges if b == position)
        if position == 0:
            model.addConstr(out == 1)
        elif position == len(leaves):
            model.addConstr(into == 1)
        else:
            model.addConstr(out - into == 0)

    def level_at(position: int) -> object:
        return sum(saved * x for _, b, saved, x in edges if b <= position and saved)

    for position, peak, x in peaks:
        model.addConstr(level_at(position) + peak * x <= budget_bytes)
    for position, row in inner_rows:
        model.addConstr(level_at(position) + row <= budget_bytes)
    model.minimize(sum(cost))
    if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return float(model.getObjectiveValue())


@pytest.mark.parametrize(("seed", "num_blocks", "leaves_each"), [(1, 4, 3), (2, 5, 2), (3, 6, 4), (4, 8, 3)])
def test_as_fast_as_the_exact_optimum(seed: int, num_blocks: int, leaves_each: int) -> None:
    problem = chain_of_blocks(seed, num_blocks, leaves_each)
    solver = Solver(problem, nested_spans=False)  # the programme knows one level of them
    low, high = solver.leanest().peak_bytes, solver.solve(10**12).peak_bytes
    assert milp_seconds(problem, low - 1) is None
    for i in range(4):
        budget = low + (high - low) * i // 4
        exact = milp_seconds(problem, budget)
        assert exact is not None
        assert solver.solve(budget).extra_seconds == pytest.approx(exact, abs=1e-5)
