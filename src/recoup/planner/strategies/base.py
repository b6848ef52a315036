"""The contract of a strategy: it proposes decisions, is sent the cost of each, and proposes again until it is done.

A strategy never simulates and never selects; the one loop that does is `planner.budget_search`. To add an action, write
a file here and one line in `registry.py`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, ClassVar, Self

from recoup.ir.decision import Decision
from recoup.planner.incumbents import Candidate, Incumbents

if TYPE_CHECKING:
    from recoup.planner.step import PlannedStep

Decisions = tuple[Decision, ...]
# Yields decisions to simulate; is sent the candidate that they make.
Proposals = Generator[Decisions, Candidate, None]


class Strategy:
    """Proposes plans of one kind.

    Attributes:
        actions: names that users may give in `actions=` to ask for it.
        is_exact: whether what it proposes is bit-equal to the plain step.
        is_fallback: whether it is asked only where the others find nothing that fits.
        dominates_step: whether it is so much of the step that no other strategy is worth asking.
    """

    actions: ClassVar[tuple[str, ...]] = ()
    is_exact: ClassVar[bool] = True
    is_fallback: bool = False
    dominates_step: bool = False

    @classmethod
    def make(cls, step: PlannedStep) -> Self | None:
        """Returns the strategy for a step; None where it was not asked for or the step has nothing for it."""
        raise NotImplementedError

    def opening(self) -> Decisions:
        """Returns decisions under which nothing runs twice and that may be faster than the plain step; () for none."""
        return ()

    def propose(self, budget_bytes: int, incumbents: Incumbents) -> Proposals:
        """Yields decisions that may fit the budget and cost little time.

        Args:
            incumbents: what was simulated so far, by whatever strategy.
        """
        yield from ()

    def shrink(self, incumbents: Incumbents) -> Proposals:
        """Yields decisions with small peaks, whatever their time."""
        yield from ()

    def improve(self, budget_bytes: int, best: Candidate) -> Proposals:
        """Yields variants of the plan that was selected; one that fits and is no slower takes its place."""
        yield from ()

    def why_not_tried(self) -> dict[str, str]:
        """Returns, for each requested action that this step has no use for, the reason."""
        return {}
