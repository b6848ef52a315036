"""Loop: a step that is mostly a loop over time, as few of its calls in chunks as the budget allows."""

from __future__ import annotations

import math
from typing import ClassVar, Self

from recoup.capture.levels import levels_after_calls
from recoup.ir.decision import Ambient
from recoup.planner.incumbents import Incumbents
from recoup.planner.simulator import EVERYWHERE, Simulator
from recoup.planner.step import PlannedStep
from recoup.planner.strategies.base import Decisions, Proposals, Strategy
from recoup.runtime.apply import apply_decisions
from recoup.solver.loops import FEWEST_CALLS, MANY_CALLS, StepLoop
from recoup.thresholds import ESTIMATE_SHARE, MOST_TRIES, SAME_SHARE

# What the calls between these two keep, each call of the loop keeps.
_PROBED_CALLS = (FEWEST_CALLS, MANY_CALLS - FEWEST_CALLS)


class LoopStrategy(Strategy):
    """Chunks of one loop.

    Attributes:
        dominates_step: whether the loop is so much of the step that no other plans are looked for.
    """

    actions: ClassVar[tuple[str, ...]] = ("recompute",)

    def __init__(self, simulator: Simulator, loop: StepLoop, *, rederives: bool) -> None:
        self._simulator = simulator
        self._loop = loop
        self._rederives = rederives
        self._insides: tuple[Ambient, ...] = ("save", "rederive") if rederives else ("save",)
        self.dominates_step = loop.dominates_step
        self.path = loop.path

    @classmethod
    def make(cls, step: PlannedStep) -> Self | None:
        """Returns the strategy if the step has a loop over time."""
        if step.loop is None:
            return None
        return cls(step.simulator, step.loop, rederives="rederive" in step.actions)

    def propose(self, budget_bytes: int, incumbents: Incumbents) -> Proposals:
        """Yields the loop in chunks, with as few of its calls in them as the budget allows."""
        if self.dominates_step and self._rederives and self._may_rederive(budget_bytes):
            whole = yield EVERYWHERE
            if whole.peak_bytes <= budget_bytes:
                return
        all_calls = self._loop.num_calls
        for inside in self._insides:
            whole = yield self._chunked(all_calls, inside)
            if whole.peak_bytes > budget_bytes:
                continue
            per_call = (incumbents.plain.peak_bytes - whole.peak_bytes) / all_calls
            wanted = (incumbents.plain.peak_bytes - budget_bytes) / per_call
            for _ in range(MOST_TRIES):
                num_calls = math.ceil(wanted * (1 + SAME_SHARE))
                if num_calls >= all_calls:
                    break
                candidate = yield self._chunked(num_calls, inside)
                over = candidate.peak_bytes - budget_bytes
                if over <= 0:
                    break
                wanted = num_calls + over / per_call
            return  # what rederives inside of the chunks, too, takes longer
        if self.dominates_step and not [c for c in incumbents.fitting(budget_bytes) if c.decisions]:
            yield from self.shrink(incumbents)

    def shrink(self, incumbents: Incumbents) -> Proposals:
        """Yields the whole loop in smaller and larger chunks, as long as that lowers the peak."""
        num_calls = self._loop.num_calls
        for inside in self._insides:
            for factor in (2.0, 0.5):
                chunk = self._loop.chunk(num_calls)
                candidate = yield self._chunked(num_calls, inside)
                while 1 <= int(chunk * factor) <= num_calls:
                    chunk = int(chunk * factor)
                    peak_bytes = candidate.peak_bytes
                    candidate = yield self._chunked(num_calls, inside, chunk=chunk)
                    if candidate.peak_bytes >= peak_bytes:
                        break

    def _chunked(self, num_calls: int, inside: Ambient, *, chunk: int | None = None) -> Decisions:
        path = self._loop.path
        buffers = tuple(sorted(b for p, found in self._simulator.mutated_buffers.items() if p == path for b in found))
        return (self._loop.decision(num_calls, chunk=chunk, inside=inside, buffers=buffers),)

    def _may_rederive(self, budget_bytes: int) -> bool:
        """Whether the step may fit with everything rederived, by what its first calls keep under that plan.

        Chains of rebuilt tensors reach from call to call: such a step takes long to simulate.
        """
        simulator = self._simulator
        if simulator.trace.source != "fake":
            return True
        with apply_decisions(simulator.spec.model, EVERYWHERE):
            levels = levels_after_calls(simulator.spec, self._loop.path, _PROBED_CALLS)
        if len(levels) < len(_PROBED_CALLS):
            return True
        first, last = _PROBED_CALLS
        fixed_bytes = simulator.fixed_bytes
        fixed_bytes += sum(s.nbytes for s in simulator.trace.storages if s.category == "optimizer")
        kept_bytes = (levels[1] - levels[0]) / (last - first) * (self._loop.num_calls - last)
        return fixed_bytes + levels[1] + kept_bytes <= budget_bytes * (1 + ESTIMATE_SHARE)
