"""Finds the fastest layout of a step within a budget: the solver proposes layouts, their simulation decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from recoup.jax.cost import Costs
from recoup.jax.exchange import holding_more
from recoup.jax.flat import Flat, live_eqns
from recoup.jax.flops import eqn_flops, nbytes
from recoup.jax.labels import cuts, holding_everything, is_loop, may_run_again, thinned, uniform
from recoup.jax.layout import Layout, Segment
from recoup.jax.options import Line, Options
from recoup.jax.rebuild import run
from recoup.jax.simulate import Memory, simulate
from recoup.jax.trace import Step, gradient_function
from recoup.solver.frontier import Solution, Solver

_MAX_PLANS = 8  # of one kind that are simulated for a budget: the solver's, and those with one price throughout
_MAX_UNITS = 4_000  # traced for one budget beside what the solver asks for


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A layout and what its simulated step takes: loss and gradients, the optimizer left out.

    Attributes:
        saved_bytes: what forward keeps for backward, arguments left out.
    """

    layout: Layout
    memory: Memory
    saved_bytes: int
    seconds: float
    flops: int


class Planner:
    """Answers every budget of one step.

    Args:
        step: traced. costs: seconds of equations. state_bytes: there beside the step: the optimizer's state.
        offload: whether values may be held in host memory.
        whole: the step on all devices, where `step` is what one of them runs.
    """

    def __init__(
        self, step: Step, costs: Costs, *, state_bytes: int = 0, offload: bool = False, whole: Step | None = None
    ) -> None:
        self.whole = step if whole is None else whole
        self.step, self.costs, self.state_bytes, self._offload = step, costs, state_bytes, offload
        self._known: dict[Layout, Candidate] = {}
        self.plain = self.simulate((Segment(first=0, last=len(step.program.units)),))
        self._solved: dict[tuple[bool, bool], tuple[Line, Solver]] = {}
        self.inexact: set[Layout] = set()  # layouts under which gradients round differently

    def simulate(self, layout: Layout) -> Candidate:
        """Returns what a layout takes, from the jaxpr of its loss and gradients."""
        if layout not in self._known:
            self._known[layout] = self.price(layout)
        return self._known[layout]

    def price(self, layout: Layout) -> Candidate:
        """Returns what a layout takes; it does not become one to choose from."""
        saved: list[int] = []
        traced = gradient_function(
            self.step,
            lambda values: run(self.step.program, layout, values),
            on_residuals=lambda kept: saved.append(sum(nbytes(r.aval) for r in kept)),
        )
        flat = Flat(jax.make_jaxpr(traced)(*self.step.avals))
        eqns = live_eqns(flat)
        return Candidate(
            layout=layout,
            memory=simulate(flat),
            saved_bytes=saved[-1],
            seconds=sum(map(self.costs.seconds, eqns)),
            flops=sum(map(eqn_flops, eqns)),
        )

    @property
    def places(self) -> list[int]:
        """Where the step is cut into segments, however sums round."""
        program = self.step.program
        return cuts(program, 0, len(program.units), self.step.active, exact=False)

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
        memory, chosen = self.plain.memory, self.step.differentiated
        gradients = memory.result_bytes[len(memory.result_bytes) - len(chosen) :]
        return memory.output_bytes - sum(gradients) + sum(self.step.shard_bytes[p] for p in chosen)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of arguments, outputs and the optimizer's state, which no plan changes."""
        return self.state_bytes + self.argument_bytes + self.output_bytes

    def _solvers(self, *, exact: bool) -> list[tuple[Line, Solver]]:
        """Returns the solvers: one that holds values on the device only, and, if allowed, one that may offload."""
        kinds = (False, True) if self._offload else (False,)
        for offload in kinds:
            if (exact, offload) not in self._solved:
                line = Options(self.step, self.costs, exact=exact, offload=offload).line(self.fixed_bytes)
                self._solved[exact, offload] = line, Solver(line.problem, actions=("recompute",))
        return [self._solved[exact, offload] for offload in kinds]

    def best(self, budget_bytes: int) -> Candidate | None:
        """Returns the fastest candidate that fits, None if none does.

        Candidates that sum in another order, and so round differently, are asked for only where no other fits.
        """
        if self.peak_bytes(self.plain) <= budget_bytes:
            return self.plain
        for exact in (True, False):
            self._search(budget_bytes, exact=exact)
            found = self.best_known(budget_bytes)
            if found is not None:
                self._hold_more(found, budget_bytes)
                return self.best_known(budget_bytes)
        return None

    def _hold_more(self, found: Candidate, budget_bytes: int) -> None:
        """Simulates what holds more values beside a candidate's, in as many of the bytes that it leaves as fit."""
        exact = found.layout not in self.inexact
        few, many = 0, budget_bytes - self.peak_bytes(found)
        room_bytes = many
        for _ in range(min(_MAX_PLANS, _MAX_UNITS // max(len(self.step.program.units), 1))):
            layout = holding_more(self.step.program, found.layout, self.step.active, self.costs, room_bytes=room_bytes)
            if layout == found.layout:
                return
            if self.peak_bytes(self._judge(layout, exact=exact)) > budget_bytes:
                many = room_bytes
            elif room_bytes == many:
                return
            else:
                few = room_bytes
            room_bytes = (few + many) // 2

    def _search(self, budget_bytes: int, *, exact: bool) -> None:
        """Simulates what the solvers say, then other layouts."""
        solvers = self._solvers(exact=exact)
        for line, solver in solvers:
            self._ask(line, solver, budget_bytes, exact=exact)
        self._search_uniform(budget_bytes, exact=exact)
        if self.best_known(budget_bytes) is None:
            for line, solver in solvers:
                self._try(line, solver.leanest(), exact=exact)

    def _ask(self, line: Line, solver: Solver, budget_bytes: int, *, exact: bool) -> None:
        """Simulates a solver's answers, moving its target until the simulated peak is near the budget."""
        low, high = solver.leanest().peak_bytes, 2 * max(budget_bytes, solver.leanest().peak_bytes)
        asked = budget_bytes
        for _ in range(_MAX_PLANS):
            candidate = self._try(line, solver.solve(asked), exact=exact)
            # The solver is off by so much here.
            over = self.peak_bytes(candidate) - budget_bytes
            if over > 0:
                high = asked
            else:
                low = asked
            if over == 0 or high - low <= 1:
                break
            step = asked - over
            asked = step if low < step < high else (low + high) // 2

    def _search_uniform(self, budget_bytes: int, *, exact: bool) -> None:
        """Simulates layouts with one price per held byte, and mixtures of the two between which the budget lies.

        The solver adds up segments priced alone; what fuses or is freed across their ends only a simulation sees.
        Steps with loops are left out: `Options` has such layouts of their bodies.
        """
        program, active = self.step.program, self.step.active
        if any(is_loop(program, unit.index, active) for unit in program.units):
            return
        left = _MAX_UNITS // max(len(program.units), 1)
        if left < 4:
            return  # too long a step to search so
        if may_run_again(program, 0, len(program.units)):
            everything = self._judge((holding_everything(program),), exact=True)
            if everything.seconds <= self.plain.seconds and self.peak_bytes(everything) <= budget_bytes:
                return
        places = cuts(program, 0, len(program.units), active, exact=exact)
        for cut in thinned(program, places, active, exact=exact):
            layouts = uniform(program, cut, active, self.costs, most=_MAX_PLANS)

            def fits(layout: Layout) -> bool:
                return self.peak_bytes(self._judge(layout, exact=exact)) <= budget_bytes

            # From most bytes to fewest, the first that fits; then as many segments of the one before it as fit.
            over, under = -1, len(layouts) - 1
            while under - over > 1 and left > 0:
                left -= 1
                middle = (over + under) // 2
                over, under = (over, middle) if fits(layouts[middle]) else (middle, under)
            fat, lean = layouts[max(over, 0)], layouts[under]
            few, many = 0, len(lean)
            while many - few > 1 and left > 0:
                left -= 1
                middle = (few + many) // 2
                few, many = (few, middle) if fits((*lean[:middle], *fat[middle:])) else (middle, many)

    def _try(self, line: Line, solution: Solution, *, exact: bool) -> Candidate:
        return self._judge(line.layout(solution.choice), exact=exact)

    def _judge(self, layout: Layout, *, exact: bool) -> Candidate:
        if not exact and layout not in self._known:
            self.inexact.add(layout)
        return self.simulate(layout)

    def best_known(self, budget_bytes: int) -> Candidate | None:
        """Returns the fastest candidate simulated so far that fits, of those that keep the bits if one does."""
        fitting = [c for c in self._known.values() if self.peak_bytes(c) <= budget_bytes]
        return min(fitting, key=lambda c: (c.layout in self.inexact, c.seconds, c.memory.temporary_bytes), default=None)

    def leanest(self) -> Candidate:
        """Returns the candidate with the smallest peak."""
        for exact in (True, False):
            for line, solver in self._solvers(exact=exact):
                self._try(line, solver.leanest(), exact=exact)
        return min(self._known.values(), key=lambda c: (c.memory.temporary_bytes, c.seconds))

    def curve(self, num_points: int) -> Sequence[Candidate]:
        """Returns candidates from the leanest to the plain one, each faster than all with a smaller peak."""
        for line, solver in self._solvers(exact=True):
            for solution in solver.frontier(num_points):
                self._try(line, solution, exact=True)
        self.leanest()
        curve: list[Candidate] = []
        for candidate in sorted(self._known.values(), key=lambda c: (self.peak_bytes(c), c.seconds)):
            if not curve or candidate.seconds < curve[-1].seconds:
                curve.append(candidate)
        return curve
