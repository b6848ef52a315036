"""The one loop: who is asked when, what is selected, and that work, not time, is what limits a search."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.capture.spec import StepSpec
from recoup.cost.model import FlopsCost
from recoup.planner.budget_search import BudgetSearch
from recoup.planner.driver import Planner
from recoup.planner.incumbents import SEARCH_OPS, Allowance, Incumbents
from recoup.planner.repair import repaired
from recoup.planner.strategies.base import Strategy
from tests.planner.fake import OPS, TILE, FakeJudge, Says, SaysTiles, candidate, region, regions


def search(judge: FakeJudge, *strategies: Strategy, prefers_equal_bits: bool = False) -> BudgetSearch:
    return BudgetSearch(judge, strategies, prefers_equal_bits=prefers_equal_bits)


def test_nothing_is_asked_where_the_plain_step_fits() -> None:
    judge, strategy = FakeJudge(), Says(proposals=[regions(1)])
    assert search(judge, strategy).fit(100) is judge.plain
    assert strategy.told == []


def test_a_strategy_is_told_what_its_proposals_cost() -> None:
    judge, strategy = FakeJudge(), Says(proposals=[regions(1), regions(3)])
    found = search(judge, strategy).fit(75)
    assert found is not None and found.decisions == regions(3)
    assert [c.peak_bytes for c in strategy.told] == [90, 70]


def test_the_fastest_that_fits_is_selected_whoever_proposed_it() -> None:
    found = search(FakeJudge(), Says(proposals=[regions(4)]), Says(proposals=[regions(3), regions(5)])).fit(70)
    assert found is not None and found.decisions == regions(3)


def test_of_equally_fast_plans_the_one_that_runs_the_least_twice() -> None:
    judge = FakeJudge()
    judge.simulated[regions(2)] = candidate(regions(2), 80, 12.05)
    judge.simulated[regions(5)] = candidate(regions(5), 80, 12.0)
    found = search(judge, Says()).fit(80)
    assert found is not None and found.decisions == regions(2)


def test_time_is_not_given_for_a_smaller_share_of_flops() -> None:
    judge = FakeJudge()
    judge.simulated[regions(2)] = dataclasses.replace(candidate(regions(2), 80, 12.1), flops=9_995, recomputed_flops=1)
    judge.simulated[regions(5)] = dataclasses.replace(candidate(regions(5), 80, 12.0), flops=10_000, recomputed_flops=6)
    found = search(judge, Says()).fit(80)
    assert found is not None and found.decisions == regions(5)


def test_flops_are_those_of_products() -> None:
    judge = FakeJudge()
    few, many = candidate(regions(2), 80, 12.05), candidate(regions(5), 80, 12.0)
    judge.simulated[regions(2)] = dataclasses.replace(few, flops=9_000, product_flops=800)
    judge.simulated[regions(5)] = dataclasses.replace(many, flops=8_000, product_flops=900)
    found = search(judge, Says()).fit(80)
    assert found is not None and found.decisions == regions(2)


def test_no_other_is_asked_where_what_fits_is_as_fast_as_can_be() -> None:
    judge = FakeJudge()
    judge.simulated[regions(2)] = candidate(regions(2), 80, 10.1)
    other = Says(proposals=[regions(5)])
    found = search(judge, Says(proposals=[regions(2)]), other).fit(80)
    assert found is not None and found.decisions == regions(2)
    assert other.told == []
    found = search(judge, Says(proposals=[regions(2)]), other).fit(75)
    assert other.told != []


def test_one_that_dominates_the_step_ends_the_round() -> None:
    judge, other = FakeJudge(), Says(proposals=[regions(1)], lean=[regions(9)])
    loop = Says(proposals=[regions(5)], lean=[regions(6)], dominates_step=True)
    found = search(judge, loop, other).fit(95)
    assert found is not None and found.decisions == regions(5)
    assert search(judge, loop, other).smallest().decisions == regions(6)
    assert other.told == []


def test_tiles_are_asked_last_where_equal_bits_are_preferred() -> None:
    tiles = SaysTiles(proposals=[(TILE,)])
    exact = Says(proposals=[regions(3)], lean=[regions(4)])
    found = search(FakeJudge(), exact, tiles, prefers_equal_bits=True).fit(85)
    assert found is not None and found.decisions == regions(3) and tiles.told == []
    found = search(FakeJudge(), exact, tiles).fit(85)
    assert found is not None and found.decisions == (TILE,)
    # Lean plans with equal bits are tried before anything rounds differently.
    unasked = SaysTiles(proposals=[(TILE,)])
    found = search(FakeJudge(), exact, unasked, prefers_equal_bits=True).fit(60)
    assert found is not None and found.decisions == regions(4) and unasked.told == []
    more = SaysTiles(proposals=[(*regions(4), TILE)])
    found = search(FakeJudge(), exact, more, prefers_equal_bits=True).fit(50)
    assert found is not None and found.decisions == (*regions(4), TILE)


class OnlyIfFaster(Strategy):
    """Proposes a region for each ten bytes that are lacking, where that is faster than what it is told of."""

    def propose(self, budget_bytes: int, incumbents: Incumbents) -> Any:
        num = -(-(100 - budget_bytes) // 10)
        if num <= 4 and FakeJudge().simulate(regions(num)).step_seconds < incumbents.seconds(budget_bytes):
            yield regions(num)


def test_tiles_known_from_an_earlier_search_are_no_rivals_where_equal_bits_are_preferred() -> None:
    tiles = SaysTiles(lean=[(TILE,), (*regions(4), TILE)])
    looking = search(FakeJudge(), OnlyIfFaster(), tiles, prefers_equal_bits=True)
    assert looking.smallest().decisions == (*regions(4), TILE)
    found = looking.fit(85)
    assert found is not None and found.decisions == regions(2), "the tile alone is faster, and rounds"


def test_tiles_are_asked_for_a_budget_though_a_smaller_plan_with_tiles_is_known() -> None:
    class Tiles(SaysTiles):
        def propose(self, budget_bytes: int, incumbents: Incumbents) -> Any:
            yield (*regions(max(-(-(85 - budget_bytes) // 10), 0))[:4], TILE)

    for prefers in (True, False):
        looking = search(FakeJudge(), Tiles(lean=[(*regions(4), TILE)]), prefers_equal_bits=prefers)
        assert looking.smallest().decisions == (*regions(4), TILE)
        found = looking.fit(65)
        assert found is not None and found.decisions == (*regions(2), TILE)


def test_where_nothing_fits_there_is_no_plan_and_the_smallest_is_known() -> None:
    looking = search(FakeJudge(), Says(proposals=[regions(2)], lean=[regions(4)]))
    assert looking.fit(50) is None
    assert looking.smallest().decisions == regions(4)


class MoreThanLean(Strategy):
    """Finds what a budget needs, up to six regions, and takes four for its leanest plan."""

    def propose(self, budget_bytes: int, incumbents: Incumbents) -> Any:
        yield regions(min(-(-(100 - budget_bytes) // 10), 6))

    def shrink(self, incumbents: Incumbents) -> Any:
        yield regions(4)


def test_no_plan_for_a_budget_is_smaller_than_the_smallest() -> None:
    assert search(FakeJudge(), MoreThanLean()).smallest().decisions == regions(6)
    for prefers in (True, False):  # each budget by itself: what another search found is not known
        looking = search(FakeJudge(), MoreThanLean(), prefers_equal_bits=prefers)
        assert looking.fit(39) is None and looking.smallest().peak_bytes == 40
        fits = search(FakeJudge(), MoreThanLean(), prefers_equal_bits=prefers).fit(40)
        assert fits is not None and fits.peak_bytes == 40


class LeanerOnceThereIsATile(Strategy):
    """Its leanest plan is that of four regions, and of six where one with a tile is known; rounds differently."""

    is_exact = False

    def shrink(self, incumbents: Incumbents) -> Any:
        has_tile = TILE in incumbents.least().decisions
        yield (*regions(6), TILE) if has_tile else regions(4)


def test_the_smallest_is_looked_for_again_from_what_was_found() -> None:
    class Tiles(SaysTiles):
        def propose(self, budget_bytes: int, incumbents: Incumbents) -> Any:
            if budget_bytes > 40:  # not for the budget itself
                yield (*regions(4), TILE)

    looking = search(FakeJudge(), LeanerOnceThereIsATile(), Tiles())
    assert looking.fit(20) is None
    peak_bytes = looking.smallest().peak_bytes
    assert peak_bytes == FakeJudge().simulate((*regions(6), TILE)).peak_bytes
    found = search(FakeJudge(), LeanerOnceThereIsATile(), Tiles()).fit(peak_bytes)
    assert found is not None, "which the error names"


def test_the_smallest_of_a_transformer_is_no_larger_than_its_plans_for_budgets() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, dim_feedforward=64, batch_first=True, norm_first=True)
    model, batch = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), torch.randn(4, 8, 32)

    def planner() -> Planner:
        spec = StepSpec(model=model, batch=batch, optimizer=torch.optim.AdamW(model.parameters()))
        return Planner(spec, cost=FlopsCost(), actions=None)

    looking = planner()
    least = looking.smallest()
    assert looking.infeasible(least.peak_bytes - 1).minimum_bytes == least.peak_bytes
    # Planners of their own: what another one found is not known to them.
    fits = planner().fit(least.peak_bytes)
    assert fits is not None and fits.peak_bytes == least.peak_bytes
    assert planner().fit(least.peak_bytes - 1) is None


def test_the_smallest_is_asked_for_less_only_where_something_new_was_found_and_for_so_many_ops() -> None:
    judge = FakeJudge()
    looking = search(judge, MoreThanLean())
    looking.smallest()
    num_asked = len(judge.asked)
    looking.smallest()
    assert judge.asked[num_asked:] == [regions(4)]

    class Endless(Strategy):
        def propose(self, budget_bytes: int, incumbents: Incumbents) -> Any:
            found = (region(-budget_bytes),)
            judge.simulated[found] = candidate(found, budget_bytes, 11.0)
            judge.num_simulated_ops += OPS
            yield found

    judge = FakeJudge()
    assert search(judge, Endless()).smallest().peak_bytes == 100 - SEARCH_OPS // OPS


def test_a_plan_is_improved_only_by_one_that_fits_and_is_no_slower() -> None:
    slower = Says(proposals=[regions(3)], better=lambda best: [(*best.decisions, region(9))])
    found = search(FakeJudge(), slower).fit(70)
    assert found is not None and found.decisions == regions(3)
    judge = FakeJudge()
    faster = (*regions(3), region(7))
    judge.simulated[faster] = candidate(faster, 70, 12.9)
    found = search(judge, Says(proposals=[regions(3)], better=lambda best: [faster])).fit(70)
    assert found is not None and found.decisions in (regions(3), faster) and found.step_seconds < 13


def test_an_opening_that_fits_is_taken_if_it_is_faster_than_the_plain_step() -> None:
    judge = FakeJudge()
    judge.simulated[regions(1)] = candidate(regions(1), 120, 8.0)
    strategy = Says(first=regions(1))
    found = search(judge, strategy).fit(120)
    assert found is not None and found.decisions == regions(1)
    assert search(judge, strategy).fit(110) is judge.plain


# -- repairs ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class FakeSolution:
    choice: int
    extra_seconds: float
    peak_bytes: int
    status: str = "optimal"


class FakeView:
    """A solver whose regions free 12 bytes each by its own reckoning: it thinks that plans fit before they do."""

    tiles = ()
    plain_seconds = 10.0
    fixed_bytes = 0

    def __init__(self) -> None:
        self.solver = self
        self.targets: list[int] = []

    def solve(self, target: int) -> FakeSolution:
        self.targets.append(target)
        num = max(-(-(100 - target) // 12), 0)
        return FakeSolution(num, float(num), 100 - 12 * num, "optimal" if num <= 8 else "infeasible")

    def decide(self, choice: int) -> Any:
        return regions(choice)

    def least_seconds(self, budget_bytes: int) -> float:
        return 0.0


@pytest.mark.parametrize("budget_bytes", [75, 52, 31])
def test_a_plan_that_is_over_is_repaired(budget_bytes: int) -> None:
    judge, view = FakeJudge(), FakeView()
    known = Incumbents(judge)

    class Repairing(Strategy):
        def propose(self, budget_bytes: int, incumbents: Incumbents) -> Any:
            yield from repaired(view, budget_bytes, known, Allowance(num_ops=10**6, began_at=0))  # type: ignore[arg-type]

    found = search(judge, Repairing()).fit(budget_bytes)
    assert found is not None and found.peak_bytes <= budget_bytes
    assert found.peak_bytes > budget_bytes - 10  # no more regions than are needed
    assert view.targets[0] == budget_bytes
    assert (view.targets[1] < budget_bytes) == (judge.simulate(judge.asked[0]).peak_bytes > budget_bytes)


def test_what_does_not_fit_and_is_slower_than_what_does_is_not_repaired() -> None:
    judge, view = FakeJudge(), FakeView()
    judge.simulated[regions(9)] = candidate(regions(9), 40, 14.5)
    proposals = repaired(view, 52, Incumbents(judge), Allowance(num_ops=10**6, began_at=0))  # type: ignore[arg-type]
    over = candidate(next(proposals), 60, 15.0)
    with pytest.raises(StopIteration):
        proposals.send(over)
    assert view.targets == [52]


def test_a_repair_asks_for_a_little_less_than_the_gap_says_if_there_is_such_a_plan() -> None:
    class AnyBytes(FakeView):
        def solve(self, target: int) -> FakeSolution:
            self.targets.append(target)
            return FakeSolution(1, -1.0, target, "optimal" if target > 4785 else "infeasible")

    view = AnyBytes()
    proposals = repaired(view, 5000, Incumbents(FakeJudge()), Allowance(num_ops=10**6, began_at=0))  # type: ignore[arg-type]
    next(proposals)
    for _ in range(2):
        proposals.send(candidate(regions(1), 5100, 9.0))
    assert view.targets == [5000, 4890, 4780, 4790]


def test_a_search_stops_after_so_many_simulated_ops_and_not_before_something_fits() -> None:
    judge, view = FakeJudge(), FakeView()

    class Repairing(Strategy):
        def propose(self, budget_bytes: int, incumbents: Incumbents) -> Any:
            for _ in range(3):
                yield from repaired(view, budget_bytes, incumbents, Allowance(num_ops=OPS, began_at=0))  # type: ignore[arg-type]

    assert search(judge, Repairing()).fit(52) is not None
    assert judge.num_simulated_ops >= 2 * OPS  # spent after the first, which did not fit
    asked = len(view.targets)
    judge.simulated[regions(9)] = candidate(regions(9), 10, 99.0)
    assert search(judge, Repairing()).fit(40) is not None
    assert len(view.targets) == asked


def test_a_region_in_which_the_step_does_not_run_is_no_plan() -> None:
    """One that begins outside of a checkpoint of the user's and ends inside cannot run again as it ran."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(x)))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, block in enumerate(self.blocks):
                inner = lambda t, b=block: b.down(nn.functional.gelu(b.up(t)))  # noqa: E731
                x = checkpoint(inner, x, use_reentrant=False) if i % 2 else block(x)
            return x.square().mean()

    model, x = Checkpointed(), torch.randn(256, 64)
    plan = recoup.plan(model, x, budget="min", loss=lambda out, batch: out)
    assert plan.predicted.peak_bytes < plan.predicted.plain_peak_bytes
    evidence = recoup.verify(model, plan, x, loss=lambda out, batch: out, timed=False)
    assert evidence.exact and evidence.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.01)
