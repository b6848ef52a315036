"""Scan: in how many bytes each scan of the step runs, moved to a budget."""

from __future__ import annotations

from typing import ClassVar, Self

from recoup.ir.decision import Decision
from recoup.planner.incumbents import SEARCH_OPS, Allowance, Incumbents
from recoup.planner.step import PlannedStep
from recoup.planner.strategies.base import Decisions, Proposals, Strategy
from recoup.planner.strategies.scan_plans import ScanPlans
from recoup.solver.scans import split_scans
from recoup.thresholds import SAME_SHARE


class ScanStrategy(Strategy):
    """Gives the scans of promising plans exactly the bytes that the budget leaves."""

    actions: ClassVar[tuple[str, ...]] = ("recompute",)

    def __init__(self, scans: ScanPlans) -> None:
        self._scans = scans

    @classmethod
    def make(cls, step: PlannedStep) -> Self | None:
        """Returns the strategy if the step has scans whose schedule is open."""
        return cls(step.scans) if step.scans is not None else None

    def opening(self) -> Decisions:
        """Returns the decisions with which all steps of all scans are taped."""
        return self._scans.taped

    def propose(self, budget_bytes: int, incumbents: Incumbents) -> Proposals:
        """Yields the plans that look fastest with their scans' bytes moved to the budget."""
        moved: list[tuple[Decision, ...]] = []
        allowance = Allowance(num_ops=SEARCH_OPS, began_at=incumbents.num_simulated_ops)
        while not allowance.is_spent(incumbents):
            best = incumbents.seconds(budget_bytes)
            found = {
                c: self._scans.seconds_at(c, budget_bytes)
                for c in incumbents.all
                if split_scans(c.decisions)[0] and split_scans(c.decisions)[1] not in moved
            }
            candidate = min(found, key=found.__getitem__, default=None)
            if candidate is None or found[candidate] >= best * (1 - SAME_SHARE):
                return
            moved.append(split_scans(candidate.decisions)[1])
            yield from self._scans.moved(candidate, budget_bytes)
