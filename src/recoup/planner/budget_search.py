"""The one loop of planning: strategies propose, the judge simulates, the fastest plan that fits is selected.

Everything that is simulated is remembered, so what one strategy finds is the incumbent that the next has to beat.
"""

from __future__ import annotations

from collections.abc import Sequence

from recoup import progress
from recoup.planner.incumbents import SEARCH_OPS, Allowance, Candidate, Incumbents, Judge
from recoup.planner.strategies.base import Proposals, Strategy
from recoup.thresholds import SAME_SHARE


class BudgetSearch:
    """Finds plans for budgets, and the plan with the smallest peak.

    Args:
        judge: what decisions cost.
        strategies: in the order they are asked.
        prefers_equal_bits: ask strategies that round differently only where nothing else fits.
        host_budget_bytes: the most that a plan may hold in the host's memory at a time; None: whatever it takes.
    """

    def __init__(
        self,
        judge: Judge,
        strategies: Sequence[Strategy],
        *,
        prefers_equal_bits: bool,
        host_budget_bytes: int | None = None,
    ) -> None:
        self._judge = judge
        self._strategies = tuple(strategies)
        self._prefers_equal_bits = prefers_equal_bits
        self._incumbents = Incumbents(judge, host_budget_bytes=host_budget_bytes)
        # Where equal bits are preferred, what rounds differently gives way to them, however fast: it is no rival.
        self._rivals = Incumbents(judge, host_budget_bytes=host_budget_bytes, exact=prefers_equal_bits)
        self._floor_bytes = -1  # the smallest peak of which a byte less was asked for

    def fit(self, budget_bytes: int) -> Candidate | None:
        """Returns the fastest plan found whose simulated peak is at most the budget, None if there is none.

        1. If the step fits with nothing running twice, as fast as it can be so, that is the answer.
        2. Each strategy proposes; one that dominates the step ends the round, and so does a plan that no timing tells
           from the fastest step with nothing running twice: nothing is left to gain.
        3. Where nothing fits: the leanest plans; then strategies that are fallbacks; then, if equal bits are preferred,
           those that round differently; then the smallest plan that can be found.
        4. The selected plan may be improved.
        """
        openings = [self._judge.plain, *(self._judge.simulate(s.opening()) for s in self._strategies if s.opening())]
        enough_seconds = min(c.step_seconds for c in openings) * (1 + SAME_SHARE)
        fitting = [c for c in openings if c.peak_bytes <= budget_bytes]
        if fitting and min(c.step_seconds for c in fitting) <= enough_seconds:
            return min(fitting, key=lambda c: c.step_seconds)
        self._ask(budget_bytes, enough_seconds=enough_seconds)
        if not self._incumbents.fitting(budget_bytes):
            self.smallest()
        return self._select(budget_bytes)

    def smallest(self) -> Candidate:
        """Returns the plan with the smallest simulated peak that was found.

        The leanest plans by the strategies' own reckoning first; then they are asked for a byte less than the smallest
        so far, until none of them finds that; and all of it again from what was found, until nothing smaller is. So no
        plan for a budget has a smaller peak, and who asks twice gets one answer.
        """
        allowance = Allowance(num_ops=SEARCH_OPS, began_at=self._incumbents.num_simulated_ops)
        least, began_bytes = self._incumbents.least(), -1
        while least.peak_bytes != began_bytes and not allowance.is_spent(self._incumbents):
            began_bytes = least.peak_bytes
            for strategy in self._strategies:
                self._try(strategy.shrink(self._incumbents))
                if strategy.dominates_step:
                    break
            least = self._incumbents.least()
            while least.peak_bytes != self._floor_bytes and not allowance.is_spent(self._incumbents):
                self._floor_bytes = least.peak_bytes
                self._ask(least.peak_bytes - 1)
                least = self._incumbents.least()
        return least

    def _ask(self, budget_bytes: int, *, enough_seconds: float = 0.0) -> None:
        """Has the strategies propose plans for a budget, in the order of `fit`, until one takes `enough_seconds`."""
        exact = [s for s in self._strategies if s.is_exact and not s.is_fallback]
        fallbacks = [s for s in self._strategies if s.is_fallback]
        others = [s for s in self._strategies if not s.is_exact and not s.is_fallback]
        asked = exact if self._prefers_equal_bits else [s for s in self._strategies if not s.is_fallback]
        remaining = progress.Remaining(len(asked))
        for number, strategy in enumerate(asked, start=1):
            with progress.stage("search", number, remaining):
                self._try(strategy.propose(budget_bytes, self._rivals))
            if strategy.dominates_step or self._rivals.seconds(budget_bytes) <= enough_seconds:
                return
        if not self._rivals.fitting(budget_bytes):
            for strategy in exact:
                self._try(strategy.shrink(self._incumbents))
            for strategy in (*fallbacks, *(others if self._prefers_equal_bits else ())):
                if not self._rivals.fitting(budget_bytes):
                    self._try(strategy.propose(budget_bytes, self._incumbents))

    def _try(self, proposals: Proposals) -> list[Candidate]:
        """Simulates what is proposed and tells the strategy what it costs; returns the candidates."""
        found: list[Candidate] = []
        try:
            decisions = next(proposals)
            while True:
                found.append(self._judge.simulate(decisions))
                decisions = proposals.send(found[-1])
        except StopIteration:
            return found

    def _select(self, budget_bytes: int) -> Candidate | None:
        best = self._incumbents.select(budget_bytes, prefers_equal_bits=self._prefers_equal_bits)
        if best is None:
            return None
        for strategy in self._strategies:
            for candidate in self._try(strategy.improve(budget_bytes, best)):
                fits = candidate.peak_bytes <= budget_bytes and self._incumbents.keeps_to_host(candidate)
                if fits and candidate.step_seconds <= best.step_seconds:
                    best = candidate
        return best
