"""From a model and a budget to a plan: capture, price, solve, and repair against the simulated applied plan.

The solver's model of memory is additive; reality has aliases. So each candidate is applied to the model, its step is
captured under fake tensors and priced, and that peak is what counts. Over the budget by d bytes: solve again for d
less. Under it with room to spare: solve for more. A plan that leaves here has passed this judge.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from recoup import progress
from recoup.capture.capture import StepSpec
from recoup.cost.host_link import Link
from recoup.cost.model import CostModel, PricedTrace
from recoup.errors import InfeasibleBudget, UsageError
from recoup.ir.decision import Ambient, Decision, Offload, Recompute, Save, TileModule
from recoup.ir.plan import Plan
from recoup.ir.trace import Trace
from recoup.planner.prediction import write_plan
from recoup.planner.simulator import EVERYWHERE, Candidate, Simulator
from recoup.planner.strategies.loop import LoopPlans
from recoup.planner.strategies.offload import find_link, problems_with_offload, with_inputs_offloaded
from recoup.planner.strategies.scan import ScanPlans
from recoup.planner.strategies.tile import (
    TiledHead,
    TiledModules,
    find_tiled_head,
    find_tiled_modules,
    halve_module_tiles,
    is_tiled,
    loss_tokens,
    retile,
    with_tiles,
)
from recoup.runtime import scan_bytes
from recoup.solver.baselines import baselines
from recoup.solver.build import build_problem, only
from recoup.solver.decisions import to_decisions
from recoup.solver.frontier import Solution, Solver
from recoup.solver.loops import find_loop
from recoup.solver.problem import Block, Leaf, Problem
from recoup.solver.scans import split_scans, under, with_scans
from recoup.solver.tiles import sets_to_try
from recoup.units import format_bytes, parse_budget

ACTIONS = ("rederive", "recompute", "tile")
OPT_IN_ACTIONS = ("offload", "tile-modules")
_MAX_REPAIRS = 5
_SEARCH_SECONDS = 15.0  # of the processor: a busy machine makes no worse plans
_MOVING_SECONDS = 40.0  # opt-in, and its first answers are further off: copies that do not hide hold memory
_KINDS_BY_HAND = 2
_NUM_BY_HAND = 4
_NUM_MOVED = 2  # plans whose scans are moved to a budget
_FASTER_BY = 0.01
_SAME_TIME = 0.01  # two plans closer than this are equally fast
_HOPEFUL = 1.04  # how far over the budget a plan may be by the solver's reckoning and still be simulated
_WORTH_ANOTHER_TRY = 0.985
_WORTH_SMALLER_TILES = 0.995
_FEWEST_TILE_TOKENS = 32
_TILE_COPIES = 2  # of a tile's logits, at worst, when tiles are made larger


class Planner(Simulator):
    """Plans for one step on one device.

    Attributes:
        prefers_equal_bits: no actions were asked for: something is tiled only where no plan with equal bits fits.
        loop: plans for its loop over time, if it has one. scans: plans for its scans, if it has some that were given
            no schedule. tiled: its head, if that can be tiled. tiled_modules: those
            that can be, if they may.
    """

    def __init__(
        self,
        spec: StepSpec,
        *,
        cost: CostModel,
        actions: Sequence[str] | None,
        fixed_bytes: int = 0,
        spans: bool = True,
    ) -> None:
        self.prefers_equal_bits = actions is None
        actions = ACTIONS if actions is None else actions
        link: Link | None = None
        if "offload" in actions:
            device = next((p.device for p in spec.model.parameters() if p.device.type != "meta"), torch.device("cpu"))
            link = find_link(cost, device=device, dialect=spec.dialect)
        num_scans = scan_bytes.num_free()
        super().__init__(spec, cost=cost, fixed_bytes=fixed_bytes, link=link)
        self.actions = tuple(actions)
        self._spans = spans
        self.scans: ScanPlans | None = None
        if "recompute" in self.actions and scan_bytes.num_free() > num_scans:
            found_scans = ScanPlans(self, derives="rederive" in self.actions)
            self.scans = found_scans if found_scans.ladders else None
        found = find_loop(self._calls_trace) if "recompute" in self.actions else None
        self.loop = LoopPlans(self, found, derives="rederive" in self.actions) if found is not None else None
        self.tiled: TiledHead | None = None
        self.tiled_modules: TiledModules | None = None
        self._saves_only: list[Solver] = []  # views without rederive
        self._looked_for_tiles = False
        self._tiles: dict[int, tuple[Decision, ...]] = {}  # of the views in which something is tiled, by identity
        self.tiled_solvers: list[Solver] = []
        self.moving_solvers: list[Solver] = []
        self.tiled_moving_solvers: list[Solver] = []
        if self.loop is not None and self.loop.rules:
            return  # `LoopPlans` finds the plans; the views are made only if somebody asks
        _ = self.solvers
        self.moving_solvers = self._moving_views(self.problem, spans)
        if not self.prefers_equal_bits:
            self._find_tiles()

    @functools.cached_property
    def solvers(self) -> list[Solver]:
        """What chooses decisions for single calls and spans, one for each view of the step."""
        variants: dict[Ambient, PricedTrace] = {
            "save": self.priced if self.scans is None else self.scans.taped_step(())
        }
        if "rederive" in self.actions:
            progress.advance("capturing the step with everything rederived")
            variants["rederive"] = self._captured(EVERYWHERE)
        self.problem: Problem = self._build(variants, spans=self._spans)
        return self._views(self.problem, variants, self._spans)

    @property
    def _calls_trace(self) -> Trace:
        """The trace of the plain step for what looks at its calls: those in a scan's steps are none."""
        return self.trace if self.scans is None else self.scans.trace

    def _captured(self, chosen: tuple[Decision, ...]) -> PricedTrace:
        """Returns the step with `chosen` applied, as views take it: all steps of its scans taped, if it has some."""
        if self.scans is not None:
            return self.scans.taped_step(chosen)
        priced = self.simulate_priced(chosen)
        self.seen[chosen] = self.candidate(chosen, priced)
        return priced

    def _build(self, variants: dict[Ambient, PricedTrace], *, spans: bool, rebuilds_inputs: bool = True) -> Problem:
        """Returns the problem; calls that run scans save, unless their tapes are smaller where they rederive."""
        ladders = self.scans.ladders if self.scans is not None else ()
        problem = build_problem(variants, spans=spans, rebuilds_inputs=rebuilds_inputs, ladders=ladders)
        if self.scans is None or (self.scans.derives and not rebuilds_inputs):
            return problem
        return under(problem, ladders, "rederive" if self.scans.derives else "save")

    def _find_tiles(self) -> None:
        """Adds the views in which something is tiled, once."""
        if self._looked_for_tiles:
            return
        self._looked_for_tiles = True
        if self.trace.source == "fake":
            if "tile" in self.actions:
                self._find_tiled_head(self._spans)
            if "tile-modules" in self.actions:
                self._find_tiled_modules(self._spans)

    def _find_tiled_head(self, spans: bool) -> None:
        """Adds views of the step with its head tiled, if it has one that can be."""
        progress.advance("capturing the step with its head tiled")
        self.tiled = find_tiled_head(self.spec, self.trace, peak_bytes=self.plain.peak_bytes)
        if self.tiled is not None:
            tile = (self.tiled.decision,)
            self._add_tiled_views(tile, spans, trace=self.tiled.trace)

    def _find_tiled_modules(self, spans: bool) -> None:
        """Adds views of the step with position-wise modules tiled, and its head if it can be."""
        progress.advance("proving which modules are position-wise")
        self.tiled_modules = find_tiled_modules(self.spec, self.trace, peak_bytes=self.plain.peak_bytes)
        head = (self.tiled.decision,) if self.tiled is not None else ()
        around_head = [h.path for h in head]  # tiled with the loss, it is in no other module's tiles
        for kinds in sets_to_try(self.tiled_modules.kinds):
            modules = self.tiled_modules.decisions(kinds)
            tiles = (*(d for d in modules if not any(f"{h}.".startswith(f"{d.path}.") for h in around_head)), *head)
            if all(t in head for t in tiles):
                continue
            progress.advance(f"capturing the step with {len(tiles)} modules tiled")
            self._add_tiled_views(tiles, spans)

    def _add_tiled_views(self, tiles: tuple[Decision, ...], spans: bool, *, trace: Trace | None = None) -> None:
        """Adds views of the step with `tiles`, priced as that step runs.

        Args:
            trace: of that step, if it was captured already.
        """
        if trace is None or self.scans is not None:
            variants: dict[Ambient, PricedTrace] = {"save": self._captured(tiles)}
        else:
            variants = {"save": self.cost.price(trace)}
            self.seen[tiles] = self.candidate(tiles, variants["save"])
        if "rederive" in self.actions:
            variants["rederive"] = self._captured((*EVERYWHERE, *tiles))
        problem = self._build(variants, spans=spans)
        solvers, moving = self._views(problem, variants, spans), self._moving_views(problem, spans)
        self._saves_only.append(solvers[-1])
        self._tiles.update({id(solver): tiles for solver in (*solvers, *moving)})
        self.tiled_solvers += solvers
        self.tiled_moving_solvers += moving

    def _with(self, tiles: tuple[Decision, ...], solvers: Sequence[Solver]) -> list[Solver]:
        """Returns the views among `solvers` in which just `tiles` are tiled."""
        return [solver for solver in solvers if self._tiles[id(solver)] == tiles]

    def _moving_views(self, problem: Problem, spans: bool) -> list[Solver]:
        """Returns solvers for views in which copies to the host hide, hide as long as the link keeps up, or do not."""
        if self.link is None:
            return []
        return [Solver(p, actions=self.actions, spans=spans) for p in problems_with_offload(problem, self.link)]

    def _views(self, problem: Problem, variants: dict[Ambient, PricedTrace], spans: bool) -> list[Solver]:
        """Returns solvers for several views of the problem; the simulation decides between their answers.

        Mixing actions freely is the richest view, and the one where what one decision drops may be what another
        rebuilds from. The others leave out a coupling each: region inputs that are rebuilt, single tensors that are.
        """
        if "rederive" not in variants:
            return [self._solver(problem, self.actions, spans)]
        views = [self._solver(problem, self.actions, spans)]
        views.append(self._solver(only(problem, "rederive"), self.actions, spans))
        if "recompute" in self.actions:
            pinned = self._build(variants, spans=spans, rebuilds_inputs=False)
            if pinned != problem:
                views.append(self._solver(pinned, self.actions, spans))
                views.append(self._solver(only(pinned, "rederive"), self.actions, spans))
            views.append(self._solver(only(pinned, "save"), ("recompute",), spans))
        return views

    def _solver(self, problem: Problem, actions: Sequence[str], spans: bool) -> Solver:
        return Solver(problem, actions=actions, spans=spans)

    # -- choosing -----------------------------------------------------------------------------------------------

    def decide(self, solver: Solver, solution: Solution) -> tuple[Decision, ...]:
        """Returns a solution's decisions, ready for the engine: one for every call where there is only one."""
        chosen: list[Decision] = []
        for decision in to_decisions(solver.line, solution.choice):
            call = None if self.num_calls.get(decision.path, 1) == 1 else decision.call
            if isinstance(decision, Recompute):
                buffers = tuple(sorted({b for p in decision.paths for b in self.mutated_buffers.get(p, ())}))
                chosen.append(dataclasses.replace(decision, call=call, buffers=buffers))
            else:
                chosen.append(dataclasses.replace(decision, call=call))
        saves_only = any(solver is view for view in (self.solvers[-1], *self._saves_only))
        if "rederive" in self.actions and chosen and chosen[0].path and not saves_only:
            chosen.insert(0, Save(path=""))  # lineage is recorded: regions' inputs use it
        if self.scans is not None:
            chosen += self.scans.decide(solution.choice)
        return with_tiles(chosen, self._tiles.get(id(solver), ()))

    def smallest(self) -> Candidate:
        """Returns the plan with the smallest simulated peak that was found."""
        if self.loop is not None:
            self.loop.shrink()
            if self.loop.rules:
                return self._least()
        self._find_tiles()
        self._shrink()
        while self._has_smaller_tiles(self._least()):  # as long as they lower the peak
            pass
        return self._least()

    def _shrink(self) -> None:
        """Simulates the leanest plan of each view there is, and of those by hand."""
        for solver in (*self.solvers, *self.moving_solvers, *self.tiled_solvers, *self.tiled_moving_solvers):
            self.simulate(self.decide(solver, solver.leanest()))
        for chosen in self._by_hand():
            chosen = chosen if self.scans is None else (*chosen, *self.scans.least())
            self.simulate(chosen)
            for tiles in dict.fromkeys(self._tiles.values()):
                self.simulate(with_tiles(chosen, tiles))

    def _has_smaller_tiles(self, least: Candidate) -> bool:
        """Simulates a plan with tiles of half the size, the loss's and the modules'; whether one of them is leaner."""
        tokens = loss_tokens(least.decisions)
        smaller = [halve_module_tiles(least.decisions, fewest=_FEWEST_TILE_TOKENS)]
        if tokens > _FEWEST_TILE_TOKENS:
            smaller += [retile(least.decisions, tokens // 2), retile(smaller[0], tokens // 2)]
        wanted = _WORTH_SMALLER_TILES * least.peak_bytes
        return any(self.simulate(d).peak_bytes <= wanted for d in dict.fromkeys(smaller) if d != least.decisions)

    def _least(self) -> Candidate:
        return min([*self.seen.values(), self.plain], key=lambda c: (c.peak_bytes, c.step_seconds))

    def _by_hand(self) -> Iterator[tuple[Decision, ...]]:
        """Yields what people would try: every call of a kind that repeats, with and without rederive around it."""
        ambients: list[tuple[Decision, ...]] = [()]
        if "rederive" in self.actions:
            yield EVERYWHERE
            ambients.append(EVERYWHERE)
        if "recompute" not in self.actions:
            return
        trace = self._calls_trace
        kinds: dict[str, list[int]] = {}
        for index, call in enumerate(trace.calls):
            if call.path and not call.refusal and not call.runs_once and call.replay_stop_op >= 0 and call.children:
                kinds.setdefault(call.kind, []).append(index)
        saved = dict.fromkeys(kinds, 0)
        for kind, members in kinds.items():
            spans = [(trace.calls[i].first_op, trace.calls[i].last_op) for i in members]
            for storage in trace.storages:
                if storage.category == "saved" and any(a <= storage.saved_op < b for a, b in spans):
                    saved[kind] += storage.nbytes
        repeated = [k for k in kinds if len(kinds[k]) >= 3]
        for kind in sorted(repeated, key=lambda k: -saved[k])[:_KINDS_BY_HAND]:
            paths = dict.fromkeys(trace.calls[i].path for i in kinds[kind])
            for ambient in ambients:
                inside: Ambient = "rederive" if ambient else "save"
                regions = ambient + tuple(Recompute(path=p, inside=inside) for p in paths)
                yield regions
                if self.link is not None:
                    yield with_inputs_offloaded(regions)
                    yield ambient + tuple(Offload(path=p, inside=inside) for p in paths)

    def fit(self, budget_bytes: int) -> Candidate | None:
        """Returns the fastest plan found whose simulated peak is at or under the budget, None if there is none."""
        if self.scans is not None:
            taped = self.simulate(self.scans.taped)
            if taped.peak_bytes <= budget_bytes:
                both = [c for c in (taped, self.plain) if c.peak_bytes <= budget_bytes]
                return min(both, key=lambda c: c.step_seconds)
        elif self.plain.peak_bytes <= budget_bytes:
            return self.plain
        if self.loop is not None:
            self.loop.fit(budget_bytes)
            if self.loop.rules:
                return self._fastest(budget_bytes)
        began = time.process_time()
        for solver in self.solvers:
            self._search(solver, budget_bytes, until=began + _SEARCH_SECONDS)
        began = time.process_time()
        for solver in self.moving_solvers:
            self._search(solver, budget_bytes, until=began + _MOVING_SECONDS)
        if not self.prefers_equal_bits:
            self._search_tiled(budget_bytes)
        self._try_by_hand(budget_bytes)
        if self.scans is not None:
            self._move_scans(budget_bytes)
        if self.prefers_equal_bits and not self._fitting(budget_bytes):
            self._shrink()
            if not self._fitting(budget_bytes):
                self._find_tiles()
                self._search_tiled(budget_bytes)
        if not self._fitting(budget_bytes):
            self.smallest()
        return self._fastest(budget_bytes)

    def _search_tiled(self, budget_bytes: int) -> None:
        """Searches the views in which something is tiled."""
        for tiles in dict.fromkeys(self._tiles.values()):
            began = time.process_time()
            for solver in self._with(tiles, self.tiled_solvers):
                self._search(solver, budget_bytes, until=began + _SEARCH_SECONDS)
            began = time.process_time()
            for solver in self._with(tiles, self.tiled_moving_solvers):
                self._search(solver, budget_bytes, until=began + _MOVING_SECONDS)
            self._drop_tiles(tiles, budget_bytes)

    def _move_scans(self, budget_bytes: int) -> None:
        """Simulates the plans that look fastest once their scans take just what is left for them."""
        assert self.scans is not None
        moved: list[tuple[Decision, ...]] = []
        for _ in range(_NUM_MOVED):
            best = min((c.step_seconds for c in self._fitting(budget_bytes)), default=float("inf"))
            found = {
                c: self.scans.seconds_at(c, budget_bytes)
                for c in self.seen.values()
                if c.decisions and split_scans(c.decisions)[0] and split_scans(c.decisions)[1] not in moved
            }
            candidate = min(found, key=found.__getitem__, default=None)
            if candidate is None or found[candidate] >= best * (1 - _FASTER_BY):
                return
            moved.append(split_scans(candidate.decisions)[1])
            self.scans.move(candidate, budget_bytes)

    def _fastest(self, budget_bytes: int) -> Candidate | None:
        fitting = self._fitting(budget_bytes)
        if not fitting:
            return None
        if self.prefers_equal_bits:
            fitting = [c for c in fitting if not is_tiled(c.decisions)] or fitting
        fastest = min(c.step_seconds for c in fitting)
        # Within what timing can tell apart, the one that runs the least twice.
        equal = [c for c in fitting if c.step_seconds <= fastest * (1 + _SAME_TIME)]
        best = min(equal, key=lambda c: (c.recomputed_flops, c.step_seconds, len(c.decisions), c.peak_bytes))
        if not is_tiled(best.decisions):
            return best
        return self._with_larger_tiles(best, budget_bytes)

    def _drop_tiles(self, tiles: tuple[Decision, ...], budget_bytes: int) -> None:
        """Simulates the fastest plan with these tiles, and everything rederived, with fewer modules tiled."""
        fitting = [c for c in self._fitting(budget_bytes) if c.decisions[-len(tiles) :] == tiles]
        if not fitting or not any(isinstance(d, TileModule) for d in tiles):
            return
        starts = [min(fitting, key=lambda c: c.step_seconds)]
        starts += [c for c in fitting if c.decisions == (*EVERYWHERE, *tiles) and c is not starts[0]]
        for candidate in starts:
            self._with_fewer_tiles(candidate, budget_bytes)

    def _with_fewer_tiles(self, candidate: Candidate, budget_bytes: int) -> None:
        """Simulates a plan with as few modules tiled as the budget needs, those that backward comes to first."""
        tiles = [d for d in candidate.decisions if isinstance(d, TileModule)]
        fewest, most = 0, len(tiles)
        while fewest < most:
            kept = (fewest + most) // 2
            dropped = tiles[: len(tiles) - kept]
            tried = self.simulate(tuple(d for d in candidate.decisions if d not in dropped))
            if tried.peak_bytes <= budget_bytes and tried.step_seconds <= candidate.step_seconds:
                candidate, most = tried, kept
            else:
                fewest = kept + 1

    def _with_larger_tiles(self, candidate: Candidate, budget_bytes: int) -> Candidate:
        """Returns the plan with tiles as large as the budget leaves room for, if that is no slower."""
        tokens = loss_tokens(candidate.decisions)
        if self.tiled is None or not tokens:
            return candidate
        head = self.tiled.head
        room = (budget_bytes - candidate.peak_bytes) // _TILE_COPIES
        larger = head.tile_tokens(tokens * head.token_bytes + room)
        if larger < 2 * tokens:
            return candidate
        tried = self.simulate(retile(candidate.decisions, larger))
        fits = tried.peak_bytes <= budget_bytes and tried.step_seconds <= candidate.step_seconds
        return tried if fits else candidate

    def _try_by_hand(self, budget_bytes: int) -> None:
        """Simulates the plans people make by hand that may be faster than what was found: none is left on the table."""
        if "recompute" not in self.actions:
            return
        solver = self.solvers[-1]
        found = min((c.step_seconds for c in self._fitting(budget_bytes)), default=float("inf"))
        allowed = found * (1 + _SAME_TIME) - self.plain.step_seconds
        hopeful = [
            b
            for b in baselines(solver.problem)
            if b.extra_seconds <= allowed and b.peak_bytes + self.fixed_bytes <= budget_bytes * _HOPEFUL
        ]
        hopeful.sort(key=lambda b: (b.extra_flops, b.extra_seconds))
        for baseline in hopeful[:_NUM_BY_HAND]:
            solution = Solution(
                status="optimal",
                choice=baseline.choice,
                peak_bytes=baseline.peak_bytes,
                extra_seconds=baseline.extra_seconds,
                extra_flops=baseline.extra_flops,
            )
            if self.simulate(self.decide(solver, solution)).peak_bytes <= budget_bytes:
                return

    def _fitting(self, budget_bytes: int) -> list[Candidate]:
        return [c for c in (*self.seen.values(), self.plain) if c.peak_bytes <= budget_bytes]

    def _search(self, solver: Solver, budget_bytes: int, *, until: float) -> None:
        """Solves for a target, simulates, and moves the target by the gap, a few times.

        Args:
            until: when, by `process_time`, to be content with what fits already.
        """
        tiles = self._tiles.get(id(solver), ())
        base = tiles if self.scans is None else with_scans(tiles, self.scans.taped)
        plain_seconds = self.seen[base].step_seconds - _seconds_of_tiles(solver.problem) if base else 0.0
        target = budget_bytes
        fits_at: int | None = None
        for _ in range(_MAX_REPAIRS if self.scans is None else 1):  # bytes of scans are moved to the budget after
            # What rounds differently is no reason to stop looking for a plan that does not.
            rivals = [c for c in self._fitting(budget_bytes) if tiles or not is_tiled(c.decisions)]
            if time.process_time() > until and rivals:
                return
            solution = solver.solve(target - self.fixed_bytes)
            if solution.status == "infeasible":
                return
            best = min((c.step_seconds for c in rivals), default=float("inf"))
            if (plain_seconds or self.plain.step_seconds) + solution.extra_seconds >= best:
                return  # even by its own reckoning no faster than what fits already
            candidate = self.simulate(self.decide(solver, solution))
            gap = candidate.peak_bytes - budget_bytes
            if gap > 0:
                if fits_at is not None:
                    return
                # From the solver's own reckoning on, if that is less: otherwise the same answer comes again.
                target = min(target, solution.peak_bytes + self.fixed_bytes) - gap
            else:
                if fits_at is not None or candidate.peak_bytes >= _WORTH_ANOTHER_TRY * budget_bytes:
                    return
                fits_at = target
                target -= gap

    def infeasible(self, budget_bytes: int) -> InfeasibleBudget:
        """Returns the error that says what the smallest reachable peak is, and what sets it."""
        smallest = self.smallest()
        largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in smallest.tensors[:3])
        needed = -(-smallest.peak_bytes // 2**20)
        return InfeasibleBudget(
            f"Budget {format_bytes(budget_bytes)} is below the smallest reachable peak "
            f"{format_bytes(smallest.peak_bytes)}, which is in the {smallest.phase} (largest there: {largest}). "
            f"Use a budget of at least {needed}MiB, a smaller batch, or a leaner optimizer or dtype.",
            budget_bytes=budget_bytes,
            minimum_bytes=smallest.peak_bytes,
            phase=smallest.phase,
            tensors=smallest.tensors,
        )

    def plan(self, candidate: Candidate, *, budget_bytes: int, budget_text: str, device: str) -> Plan:
        """Returns the plan for people and for disk."""
        return write_plan(
            self,
            candidate,
            budget_bytes=budget_bytes,
            budget_text=budget_text,
            device=device,
        )


def _seconds_of_tiles(problem: Problem) -> float:
    """Returns what the tiled modules' second forwards take: a solver counts them, and so does the step."""

    def seconds(part: Leaf | Block) -> float:
        if isinstance(part, Leaf):
            return part.options[0].extra_seconds
        return sum(seconds(p) for p in part.parts)

    return sum(seconds(p) for p in problem.parts)


def check_actions(actions: Any) -> tuple[str, ...] | None:
    """Returns the actions as a tuple, None where none were asked for.

    Raises:
        UsageError: if one is not known.
    """
    if actions is None:
        return None
    chosen = (actions,) if isinstance(actions, str) else tuple(actions)
    for action in chosen:
        if action not in (*ACTIONS, *OPT_IN_ACTIONS):
            known = ", ".join((*ACTIONS, *OPT_IN_ACTIONS))
            raise UsageError(f"Unknown action {action!r}. Choose from {known} (save is always there).")
    return chosen


def plan_for_budget(
    planner: Planner, *, budget: int | str, free_bytes: int | None, device: str
) -> tuple[Plan, Candidate]:
    """Returns the fastest plan for the budget.

    Raises:
        InfeasibleBudget: if the smallest reachable peak is above it.
    """
    budget_bytes = parse_budget(budget, plain_peak_bytes=planner.plain.peak_bytes, free_bytes=free_bytes)
    candidate = planner.fit(budget_bytes)
    if candidate is None:
        raise planner.infeasible(budget_bytes)
    return planner.plan(candidate, budget_bytes=budget_bytes, budget_text=str(budget), device=device), candidate


def is_on_meta(model: nn.Module) -> bool:
    """Whether any parameter has no data."""
    return any(p.device.type == "meta" for p in model.parameters())
