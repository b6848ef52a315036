"""A simulator and strategies of a few lines, for tests of the one loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import ClassVar

from recoup.ir.decision import Decision, Recompute, TileLoss
from recoup.planner.incumbents import Candidate, Incumbents
from recoup.planner.strategies.base import Decisions, Proposals, Strategy

OPS = 100


def region(number: int) -> Decision:
    return Recompute(path=f"layers.{number}")


def regions(num: int) -> Decisions:
    return tuple(region(i) for i in range(num))


TILE = TileLoss(path="head", tile_tokens=64)


def candidate(decisions: Decisions, peak_bytes: int, step_seconds: float) -> Candidate:
    return Candidate(
        decisions=decisions,
        peak_bytes=peak_bytes,
        step_seconds=step_seconds,
        flops=100 + len(decisions),
        recomputed_flops=len(decisions),
        forward_saved_bytes=0,
        saved_bytes=0,
        phase="backward",
        tensors=(),
    )


class FakeJudge:
    """Each region frees 10 bytes of 100 and takes a second more than 10; a tile frees 15 and takes half a second."""

    def __init__(self) -> None:
        self.plain = candidate((), 100, 10.0)
        self.simulated: dict[Decisions, Candidate] = {}
        self.num_simulated_ops = 0
        self.asked: list[Decisions] = []

    def simulate(self, chosen: Decisions) -> Candidate:
        self.asked.append(chosen)
        if not chosen:
            return self.plain
        if chosen not in self.simulated:
            num_tiles = sum(d == TILE for d in chosen)
            num = len(chosen) - num_tiles
            found = candidate(chosen, 100 - 10 * num - 15 * num_tiles, 10.0 + num + num_tiles / 2)
            self.simulated[chosen] = found
            self.num_simulated_ops += OPS
        return self.simulated[chosen]


@dataclasses.dataclass
class Says(Strategy):
    """Proposes what it was given, and notes what it is told."""

    proposals: Iterable[Decisions] = ()
    lean: Iterable[Decisions] = ()
    better: Callable[[Candidate], Iterable[Decisions]] = lambda best: ()
    first: Decisions = ()
    dominates_step: bool = False
    told: list[Candidate] = dataclasses.field(default_factory=list)

    def opening(self) -> Decisions:
        return self.first

    def propose(self, budget_bytes: int, incumbents: Incumbents) -> Proposals:
        for decisions in self.proposals:
            self.told.append((yield decisions))

    def shrink(self, incumbents: Incumbents) -> Proposals:
        yield from (d for d in self.lean)

    def improve(self, budget_bytes: int, best: Candidate) -> Proposals:
        yield from (d for d in self.better(best))


class SaysTiles(Says):
    is_exact: ClassVar[bool] = False
