"""Finds the fastest layout of a step inside a budget: the solver proposes, simulation of the planned gradient judges."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from recoup.jax.cost import Costs
from recoup.jax.flops import eqn_flops, nbytes
from recoup.jax.layout import Segment
from recoup.jax.options import Line, Options
from recoup.jax.rebuild import run
from recoup.jax.simulate import Memory, live_eqns, simulate
from recoup.jax.trace import Step, gradient_function
from recoup.solver.frontier import Solver

_ROUNDS = 8  # of asking the solver

Layout = tuple[Segment, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A layout and what its simulated step takes: loss and gradients, the optimizer left out."""

    layout: Layout
    memory: Memory
    seconds: float
    flops: int


class Planner:
    """Answers every budget of one step.

    Args:
        step: traced. costs: seconds of equations. state_bytes: there beside the step: the optimizer's state.
    """

    def __init__(self, step: Step, costs: Costs, *, state_bytes: int = 0) -> None:
        self.step, self.costs, self.state_bytes = step, costs, state_bytes
        self._known: dict[Layout, Candidate] = {}
        self.plain = self.simulate((Segment(first=0, last=len(step.program.units)),))
        self._solved: tuple[Line, Solver] | None = None

    def simulate(self, layout: Layout) -> Candidate:
        """Returns what a layout takes, from the jaxpr of its loss and gradients."""
        found = self._known.get(layout)
        if found is None:
            jaxpr = jax.make_jaxpr(gradient_function(self.step, lambda v: run(self.step.program, layout, v)))(
                *self.step.avals
            )
            eqns = live_eqns(jaxpr)
            found = self._known[layout] = Candidate(
                layout=layout,
                memory=simulate(jaxpr),
                seconds=sum(map(self.costs.seconds, eqns)),
                flops=sum(map(eqn_flops, eqns)),
            )
        return found

    def peak_bytes(self, candidate: Candidate) -> int:
        """Returns the peak of the step on one device, the optimizer's state counted."""
        return self.fixed_bytes + candidate.memory.temporary_bytes

    @property
    def argument_bytes(self) -> int:
        """The arguments on one device."""
        return sum(self.step.shard_bytes)

    @property
    def output_bytes(self) -> int:
        """Loss, gradients and what else the step returns, on one device: gradients lie where their arguments do."""
        sizes = [nbytes(a) for a in self.step.avals]
        elsewhere = sum(sizes[p] - self.step.shard_bytes[p] for p in self.step.differentiated)
        return self.plain.memory.output_bytes - elsewhere

    @property
    def fixed_bytes(self) -> int:
        """Arguments, outputs and the optimizer's state: there whatever is planned."""
        return self.state_bytes + self.argument_bytes + self.output_bytes

    def _solver(self) -> tuple[Line, Solver]:
        if self._solved is None:
            line = Options(self.step, self.costs).line(self.fixed_bytes)
            actions = {o.action for block in line.problem.parts for leaf in block.parts for o in leaf.options}
            self._solved = line, Solver(line.problem, actions=sorted(actions | {"recompute"}))
        return self._solved

    def best(self, budget_bytes: int) -> Candidate | None:
        """Returns the fastest candidate that fits, None if none does."""
        if self.peak_bytes(self.plain) <= budget_bytes:
            return self.plain
        line, solver = self._solver()
        # The solver's peak is off the simulated one by what its sums do not see: ask until the simulated one fits.
        low, high = solver.leanest().peak_bytes, 2 * max(budget_bytes, solver.leanest().peak_bytes)
        asked = budget_bytes
        for _ in range(_ROUNDS):
            candidate = self.simulate(line.layout(solver.solve(asked).choice))
            over = self.peak_bytes(candidate) - budget_bytes
            if over > 0:
                high = asked
            else:
                low = asked
            step = asked - over
            asked = step if low < step < high else (low + high) // 2
            if high - low <= 1:
                break
        self.leanest()
        return self.best_known(budget_bytes)

    def best_known(self, budget_bytes: int) -> Candidate | None:
        """Returns the fastest candidate simulated so far that fits."""
        fitting = [c for c in self._known.values() if self.peak_bytes(c) <= budget_bytes]
        return min(fitting, key=lambda c: (c.seconds, c.memory.temporary_bytes), default=None)

    def leanest(self) -> Candidate:
        """Returns the candidate with the smallest peak."""
        line, solver = self._solver()
        self.simulate(line.layout(solver.leanest().choice))
        return min(self._known.values(), key=lambda c: (c.memory.temporary_bytes, c.seconds))

    def curve(self, num_points: int) -> Sequence[Candidate]:
        """Returns candidates from the leanest to the plain one, each faster than all with a smaller peak."""
        line, solver = self._solver()
        for solution in solver.frontier(num_points):
            self.simulate(line.layout(solution.choice))
        curve: list[Any] = []
        for candidate in sorted(self._known.values(), key=lambda c: (self.peak_bytes(c), c.seconds)):
            if not curve or candidate.seconds < curve[-1].seconds:
                curve.append(candidate)
        return curve
