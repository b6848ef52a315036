"""Views: the step as a solver sees it, under one assumption each. The simulation decides between their answers.

Mixing actions freely is the richest view, and the one where what one decision drops may be what another rebuilds from.
The others leave out a coupling each: region inputs that are rebuilt, single tensors that are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

from recoup import progress
from recoup.cost.model import PricedTrace
from recoup.ir.decision import Ambient, Decision, Recompute, Save
from recoup.ir.trace import Trace
from recoup.planner.simulator import EVERYWHERE, Simulator
from recoup.planner.strategies.scan_plans import ScanPlans
from recoup.planner.strategies.tile import with_tiles
from recoup.solver.build import build_problem, only
from recoup.solver.decisions import to_decisions
from recoup.solver.frontier import Solver
from recoup.solver.problem import Block, Leaf, Problem
from recoup.solver.scans import under, with_scans
from recoup.solver.sequence import Choice, Line


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """One solver problem of the step, and how its choices become decisions.

    Attributes:
        name: what may be chosen in it.
        make_solver: of its problem.
        tiles: what is tiled throughout.
        plain_seconds: of the step that its solver's extra seconds are counted from.
        fixed_bytes: on the device whatever the step does, which its problem does not hold.
        to_plan: turns a solver's choice into decisions for the engine.
        richer: a view that has all choices of this one, at the same prices.
    """

    name: str
    make_solver: Callable[[], Solver]
    tiles: tuple[Decision, ...]
    plain_seconds: float
    fixed_bytes: int
    to_plan: Callable[[Line, Choice], tuple[Decision, ...]]
    richer: View | None = None

    @functools.cached_property
    def solver(self) -> Solver:
        """The solver of its problem, made when it is first asked for."""
        return self.make_solver()

    def least_seconds(self, budget_bytes: int) -> float:
        """Returns a lower bound on the step seconds of its answers for the budget, without solving it."""
        if self.richer is None:
            return 0.0
        solution = self.richer.solver.solve(budget_bytes - self.fixed_bytes)
        return self.plain_seconds + solution.extra_seconds if solution.status == "optimal" else 0.0

    def decide(self, choice: Choice) -> tuple[Decision, ...]:
        """Returns the decisions that a choice stands for."""
        return self.to_plan(self.solver.line, choice)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ViewSet:
    """The views of a step with something, or nothing, tiled.

    Attributes:
        problem: in which actions mix freely.
        views: in the order they are asked, the one whose estimates hold best first.
        saving: the view in which what is in no region is saved.
    """

    tiles: tuple[Decision, ...]
    problem: Problem
    views: tuple[View, ...]
    saving: View


class ViewMaker:
    """Makes views of one step.

    Args:
        actions: those that may be chosen.
        spans: whether consecutive calls may form one region.
        scans: plans for its scans, if it has some that were given no schedule.
    """

    def __init__(self, simulator: Simulator, *, actions: tuple[str, ...], spans: bool, scans: ScanPlans | None) -> None:
        self._simulator = simulator
        self._actions = actions
        self._spans = spans
        self._scans = scans

    @functools.cached_property
    def plain(self) -> ViewSet:
        """The views of the step with nothing tiled."""
        scans = self._scans
        variants: dict[Ambient, PricedTrace] = {
            "save": self._simulator.priced if scans is None else scans.taped_step(())
        }
        if "rederive" in self._actions:
            progress.advance("capturing the step with everything rederived")
            variants["rederive"] = self._captured(EVERYWHERE)
        return self._set((), variants)

    @functools.cached_property
    def based(self) -> ViewSet:
        """The views of the step with what every plan may have besides: its losses in place."""
        base, priced = self._simulator.base
        if not base:
            return self.plain
        variants: dict[Ambient, PricedTrace] = {"save": priced}
        if "rederive" in self._actions:
            variants["rederive"] = self._captured((*EVERYWHERE, *base))
        return self._set(base, variants)

    def tiled(self, tiles: tuple[Decision, ...], *, trace: Trace | None = None) -> ViewSet:
        """Returns the views of the step with `tiles`, priced as that step runs.

        Args:
            trace: of that step, if it was captured already.
        """
        simulator = self._simulator
        if trace is None or self._scans is not None:
            variants: dict[Ambient, PricedTrace] = {"save": self._captured(tiles)}
        else:
            variants = {"save": simulator.cost.price(trace)}
            simulator.note(tiles, variants["save"])
        if "rederive" in self._actions:
            variants["rederive"] = self._captured((*EVERYWHERE, *tiles))
        return self._set(tiles, variants)

    def view(
        self,
        name: str,
        problem: Problem,
        tiles: tuple[Decision, ...],
        *,
        actions: tuple[str, ...],
        records: bool,
        richer: View | None = None,
    ) -> View:
        """Returns a view.

        Args:
            records: whether lineage is recorded in its plans, so that inputs of regions may be rebuilt.
            richer: see `View`.
        """
        base = tiles if self._scans is None else with_scans(tiles, self._scans.taped)
        base_seconds = self._simulator.simulate(base).step_seconds
        return View(
            name=name,
            make_solver=functools.partial(Solver, problem, actions=actions, spans=self._spans),
            tiles=tiles,
            plain_seconds=base_seconds - (_seconds_of_tiles(problem) if base else 0.0),
            fixed_bytes=self._simulator.fixed_bytes,
            to_plan=functools.partial(self._to_plan, tiles, records),
            richer=richer,
        )

    def _set(self, tiles: tuple[Decision, ...], variants: Mapping[Ambient, PricedTrace]) -> ViewSet:
        problem = self._build(variants)
        make = functools.partial(self.view, tiles=tiles)
        actions = self._actions
        if "rederive" not in variants:
            saving = make("regions", problem, actions=actions, records=False)
            return ViewSet(tiles=tiles, problem=problem, views=(saving,), saving=saving)
        mixed = make("all", problem, actions=actions, records=True)
        views = [mixed, make("all rederived", only(problem, "rederive"), actions=actions, records=True, richer=mixed)]
        if "recompute" in actions:
            pinned, free = self._build(variants, rebuilds_inputs=False), mixed
            if pinned != problem:
                free = make("inputs kept", pinned, actions=actions, records=False)
                rederived = only(pinned, "rederive")
                closest = make("inputs kept, all rederived", rederived, actions=actions, records=False, richer=free)
                views = [free, closest, *views]
            regions = only(pinned, "save")
            views.append(make("regions", regions, actions=("recompute",), records=False, richer=free))
        return ViewSet(tiles=tiles, problem=problem, views=tuple(views), saving=views[-1])

    def _captured(self, chosen: tuple[Decision, ...]) -> PricedTrace:
        """Returns the step with `chosen` applied, as views take it: all steps of its scans taped, if it has some."""
        if self._scans is not None:
            return self._scans.taped_step(chosen)
        priced = self._simulator.simulate_priced(chosen)
        self._simulator.note(chosen, priced)
        return priced

    def _build(self, variants: Mapping[Ambient, PricedTrace], *, rebuilds_inputs: bool = True) -> Problem:
        """Returns the problem; calls that run scans save, unless their tapes are smaller where they rederive."""
        scans = self._scans
        ladders = scans.ladders if scans is not None else ()
        problem = build_problem(variants, spans=self._spans, rebuilds_inputs=rebuilds_inputs, ladders=ladders)
        if scans is None or (scans.rederives and not rebuilds_inputs):
            return problem
        return under(problem, ladders, "rederive" if scans.rederives else "save")

    def _to_plan(self, tiles: tuple[Decision, ...], records: bool, line: Line, choice: Choice) -> tuple[Decision, ...]:
        """Returns a choice's decisions, ready for the engine: one for every call where there is only one."""
        simulator = self._simulator
        chosen: list[Decision] = []
        for decision in to_decisions(line, choice):
            call = None if simulator.num_calls.get(decision.path, 1) == 1 else decision.call
            if isinstance(decision, Recompute):
                buffers = tuple(sorted({b for p in decision.paths for b in simulator.mutated_buffers.get(p, ())}))
                chosen.append(dataclasses.replace(decision, call=call, buffers=buffers))
            else:
                chosen.append(dataclasses.replace(decision, call=call))
        if records and "rederive" in self._actions and chosen and chosen[0].path:
            chosen.insert(0, Save(path=""))  # lineage is recorded: regions' inputs use it
        if self._scans is not None:
            chosen += self._scans.decide(choice)
        return with_tiles(chosen, tiles)


def _seconds_of_tiles(problem: Problem) -> float:
    """Returns the seconds of the tiled modules' second forwards, which the solver counts as the step does."""

    def seconds(part: Leaf | Block) -> float:
        if isinstance(part, Leaf):
            return part.options[0].extra_seconds
        return sum(seconds(p) for p in part.parts)

    return sum(seconds(p) for p in problem.parts)
