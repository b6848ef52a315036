"""Plans for a step that is mostly a loop over time: as few of its calls in chunks as the budget allows."""

from __future__ import annotations

import math

from recoup.capture.capture import levels_after_calls
from recoup.ir.decision import Ambient
from recoup.planner.simulator import EVERYWHERE, Candidate, Simulator
from recoup.runtime.apply import apply_decisions
from recoup.solver.loops import StepLoop

_TRIES = 2
_MARGIN = 1.02
_PROBED_CALLS = (24, 60)
_PROBE_MARGIN = 1.05


class LoopPlans:
    """Simulates chunks of one loop.

    Attributes:
        rules: whether the loop is so much of the step that no other plans are looked for.

    Args:
        derives: whether chunks may rederive, and the whole step.
    """

    def __init__(self, simulator: Simulator, loop: StepLoop, *, derives: bool) -> None:
        self._simulator = simulator
        self._loop = loop
        self._derives = derives
        self._insides: tuple[Ambient, ...] = ("save", "rederive") if derives else ("save",)
        self.rules = loop.rules

    def _simulate(self, num_calls: int, *, inside: Ambient, chunk: int | None = None) -> Candidate:
        path = self._loop.path
        buffers = tuple(sorted(b for p, found in self._simulator.mutated_buffers.items() if p == path for b in found))
        return self._simulator.simulate((self._loop.decision(num_calls, chunk=chunk, inside=inside, buffers=buffers),))

    def _may_rederive(self, budget_bytes: int) -> bool:
        """Whether the step may fit with everything rederived, by what its first calls keep under that plan.

        Chains of rebuilt tensors reach from call to call: such a step can seldom be folded and takes long to simulate.
        """
        spec = self._simulator.spec
        if self._simulator.trace.source != "fake":
            return True
        with apply_decisions(spec.model, EVERYWHERE):
            levels = levels_after_calls(spec, self._loop.path, _PROBED_CALLS)
        if len(levels) < len(_PROBED_CALLS):
            return True
        first, last = _PROBED_CALLS
        storages = self._simulator.trace.storages
        fixed_bytes = self._simulator.fixed_bytes + sum(s.nbytes for s in storages if s.category == "optimizer")
        kept_bytes = (levels[1] - levels[0]) / (last - first) * (self._loop.num_calls - last)
        return fixed_bytes + levels[1] + kept_bytes <= budget_bytes * _PROBE_MARGIN

    def fit(self, budget_bytes: int) -> None:
        """Simulates the loop in chunks, with as few of its calls in them as the budget allows.

        The peak falls about evenly with each call that is chunked, so two tries find how many are needed.
        """
        simulator = self._simulator
        rederives = self.rules and self._derives and self._may_rederive(budget_bytes)
        if rederives and simulator.simulate(EVERYWHERE).peak_bytes <= budget_bytes:
            return
        for inside in self._insides:
            all_calls = self._loop.num_calls
            whole = self._simulate(all_calls, inside=inside)
            if whole.peak_bytes > budget_bytes:
                continue
            per_call = (simulator.plain.peak_bytes - whole.peak_bytes) / all_calls
            wanted = (simulator.plain.peak_bytes - budget_bytes) / per_call
            for _ in range(_TRIES):
                num_calls = math.ceil(wanted * _MARGIN)
                if num_calls >= all_calls:
                    break
                over = self._simulate(num_calls, inside=inside).peak_bytes - budget_bytes
                if over <= 0:
                    break
                wanted = num_calls + over / per_call
            if self.rules:
                return
        if self.rules and all(c.peak_bytes > budget_bytes for c in simulator.seen.values()):
            self.shrink()

    def shrink(self) -> None:
        """Simulates the whole loop in smaller and larger chunks, as long as that lowers the peak."""
        num_calls = self._loop.num_calls
        for inside in self._insides:
            for factor in (2.0, 0.5):
                chunk = self._loop.chunk(num_calls)
                peak = self._simulate(num_calls, inside=inside).peak_bytes
                while 1 <= int(chunk * factor) <= num_calls:
                    chunk = int(chunk * factor)
                    found = self._simulate(num_calls, inside=inside, chunk=chunk).peak_bytes
                    if found >= peak:
                        break
                    peak = found
