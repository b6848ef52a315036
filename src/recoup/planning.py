"""From a model and a budget to a plan: capture, price, solve, and repair against the simulated applied plan.

The solver's model of memory is additive; reality has aliases. So each candidate is applied to the model, its step is
captured under fake tensors and priced, and that peak is what counts. Over the budget by d bytes: solve again for d
less. Under it with room to spare: solve for more. A plan that leaves here has passed this judge.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from recoup import progress
from recoup.capture.capture import StepSpec, capture
from recoup.cost.copies import Link, with_copies
from recoup.cost.model import CostModel, PricedTrace
from recoup.engine.handle import apply_decisions, caching_paths
from recoup.engine.state import statistics_buffers
from recoup.errors import InfeasibleBudget, UsageError
from recoup.ir.plan import Decision, Inside, Plan, Prediction
from recoup.ir.trace import Trace
from recoup.labels import group_labels
from recoup.offloading import find_link, problems_with_offload, with_inputs_offloaded
from recoup.solve.baselines import baselines
from recoup.solve.build import REGION_OVERHEAD_SECONDS, build_problem, only
from recoup.solve.decisions import to_decisions
from recoup.solve.frontier import Solution, Solver
from recoup.solve.loops import find_loop
from recoup.solve.problem import Problem
from recoup.tiling import TiledHead, find_tiled_head, is_tiled, retile
from recoup.units import format_bytes, parse_budget

ACTIONS = ("rederive", "recompute", "tile")
OPT_IN_ACTIONS = ("offload",)
_EVERYWHERE = (Decision(path="", action="rederive"),)
_MAX_REPAIRS = 5
_SEARCH_SECONDS = 8.0
_MOVING_SECONDS = 40.0  # opt-in, and its first answers are further off: copies that do not hide hold memory
_KINDS_BY_HAND = 2
_NUM_BY_HAND = 4
_SAME_TIME = 0.01  # two plans closer than this are equally fast
_EQUAL_BITS_ARE_WORTH = 0.2  # of a step's time: a plan that rounds differently must be faster by more
_HOPEFUL = 1.04  # how far over the budget a plan may be by the solver's reckoning and still be simulated
_WORTH_ANOTHER_TRY = 0.985
_WORTH_SMALLER_TILES = 0.995
_FEWEST_TILE_TOKENS = 32
_LOOP_TRIES = 2
_LOOP_MARGIN = 1.02
_TILE_COPIES = 2  # of a tile's logits, at worst, when tiles are made larger


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A set of decisions and what the simulation of the applied plan says of it."""

    decisions: tuple[Decision, ...]
    peak_bytes: int
    step_seconds: float
    recomputed_flops: int
    saved_bytes: int
    phase: str
    tensors: tuple[tuple[str, int], ...]
    offloaded_bytes: int = 0


class Planner:
    """Plans for one step on one device; candidates are simulated once each.

    Attributes:
        plain: the step without a plan. loop: its loop over time, if it has one. cost: prices ops.
        fixed_bytes: what the device takes whatever the step does (library workspaces).
    """

    def __init__(
        self, spec: StepSpec, *, cost: CostModel, actions: Sequence[str], fixed_bytes: int = 0, spans: bool = True
    ) -> None:
        self.spec = spec
        self.cost = cost
        self.actions = tuple(actions)
        self.fixed_bytes = fixed_bytes
        self._spans = spans
        self.link: Link | None = None
        if "offload" in self.actions:
            device = next((p.device for p in spec.model.parameters() if p.device.type != "meta"), torch.device("cpu"))
            self.link = find_link(cost, device=device, dialect=spec.dialect)
        self._seen: dict[tuple[Decision, ...], Candidate] = {}
        progress.advance("capturing the step")
        trace = capture(spec)
        progress.advance(f"pricing {len(trace.signatures)} distinct ops")
        self.priced = cost.price(trace)
        self._optimizer = self._optimizer_step()
        known = set(statistics_buffers(spec.model.named_modules()))  # the engine finds these by itself
        self._buffers = {c.path: tuple(b for b in c.mutated_buffers if b not in known) for c in trace.calls}
        self._num_calls: dict[str, int] = {}
        for call in trace.calls:
            self._num_calls[call.path] = max(self._num_calls.get(call.path, 0), call.index + 1)
        self.plain = self._candidate((), self.priced)
        self.loop = find_loop(trace) if "recompute" in self.actions else None
        self.tiled: TiledHead | None = None
        self.tiled_solvers: list[Solver] = []
        self.moving_solvers: list[Solver] = []
        self.tiled_moving_solvers: list[Solver] = []
        if self.loop is not None and self.loop.rules:
            return  # see `_fit_loop`; the views are made only if somebody asks
        _ = self.solvers
        self.moving_solvers = self._moving_views(self.problem, spans)
        if "tile" in self.actions and trace.source == "fake":
            self._add_tiled_views(spans)

    @functools.cached_property
    def solvers(self) -> list[Solver]:
        """What chooses decisions for single calls and spans, one for each view of the step."""
        variants = {"save": self.priced}
        if "rederive" in self.actions:
            progress.advance("capturing the step with everything rederived")
            variants["rederive"] = self.simulate_priced(_EVERYWHERE)
            self._seen[_EVERYWHERE] = self._candidate(_EVERYWHERE, variants["rederive"])
        self.problem: Problem = build_problem(variants, spans=self._spans)
        return self._views(self.problem, variants, self._spans)

    def _add_tiled_views(self, spans: bool) -> None:
        """Adds views of the step with its head tiled, if it has one that can be: priced as that step runs."""
        progress.advance("capturing the step with its head tiled")
        self.tiled = find_tiled_head(self.spec, self.trace, peak_bytes=self.plain.peak_bytes)
        if self.tiled is None:
            return
        tile = (self.tiled.decision,)
        variants = {"save": self.cost.price(self.tiled.trace)}
        self._seen[tile] = self._candidate(tile, variants["save"])
        if "rederive" in self.actions:
            both = (*_EVERYWHERE, *tile)
            variants["rederive"] = self.simulate_priced(both)
            self._seen[both] = self._candidate(both, variants["rederive"])
        problem = build_problem(variants, spans=spans)
        self.tiled_solvers = self._views(problem, variants, spans)
        self.tiled_moving_solvers = self._moving_views(problem, spans)

    def _moving_views(self, problem: Problem, spans: bool) -> list[Solver]:
        """Returns solvers for views in which copies to the host hide, hide as long as the link keeps up, or do not."""
        if self.link is None:
            return []
        return [Solver(p, actions=self.actions, spans=spans) for p in problems_with_offload(problem, self.link)]

    def _views(self, problem: Problem, variants: dict[str, PricedTrace], spans: bool) -> list[Solver]:
        """Returns solvers for several views of the problem; the simulation decides between their answers.

        Mixing actions freely is the richest view, and the one where what one decision drops may be what another
        rebuilds from. The others leave out a coupling each: region inputs that are rebuilt, single tensors that are.
        """
        if "rederive" not in variants:
            return [Solver(problem, actions=self.actions, spans=spans)]
        views = [Solver(problem, actions=self.actions, spans=spans)]
        views.append(Solver(only(problem, "rederive"), actions=self.actions, spans=spans))
        if "recompute" in self.actions:
            pinned = build_problem(variants, spans=spans, rebuilds_inputs=False)
            if pinned != problem:
                views.append(Solver(pinned, actions=self.actions, spans=spans))
                views.append(Solver(only(pinned, "rederive"), actions=self.actions, spans=spans))
            views.append(Solver(only(pinned, "save"), actions=("recompute",), spans=spans))
        return views

    @property
    def trace(self) -> Trace:
        """The trace of the plain step."""
        return self.priced.trace

    def simulate_priced(self, chosen: tuple[Decision, ...]) -> PricedTrace:
        """Returns the step with `chosen` applied, captured and priced; without the optimizer's part."""
        with apply_decisions(self.spec.model, chosen):
            priced = self.cost.price(capture(self.spec, known=self.trace))
        return priced if self.link is None else with_copies(priced, self.link)

    def simulate(self, chosen: tuple[Decision, ...]) -> Candidate:
        """Returns what the step costs with `chosen` applied, by running it under fake tensors."""
        if not chosen:
            return self.plain
        found = self._seen.get(chosen)
        if found is None:
            progress.advance(f"simulating a plan with {len(chosen)} decisions")
            found = self._seen[chosen] = self._candidate(chosen, self.simulate_priced(chosen))
        return found

    def _optimizer_step(self) -> tuple[int, float]:
        """Returns the peak and the seconds of the optimizer's step, which no plan changes."""
        trace, priced = self.priced.trace, self.priced
        at = [i for i, o in enumerate(trace.ops) if o.phase == "optimizer"]
        levels = trace.levels(priced.op_workspace_bytes)
        return max((levels[i] for i in at), default=0), sum(priced.op_seconds[i] for i in at)

    def _candidate(self, chosen: tuple[Decision, ...], priced: PricedTrace) -> Candidate:
        trace = priced.trace
        levels = trace.levels(priced.op_workspace_bytes)
        at = max(range(len(levels)), key=levels.__getitem__)
        op = trace.ops[at]
        alive = sorted(
            (s for s in trace.storages if s.alloc_op <= at <= s.free_op), key=lambda s: s.nbytes, reverse=True
        )
        tensors = group_labels([(s.label, s.nbytes) for s in alive])
        if priced.op_workspace_bytes[at]:
            name = trace.signatures[op.signature].name
            tensors = [*tensors, (f"workspace of {name}", priced.op_workspace_bytes[at])]
            tensors.sort(key=lambda item: -item[1])
        phase = "replay" if op.replayed else op.phase
        peak_bytes = levels[at]
        seconds = sum(s for s, o in zip(priced.op_seconds, trace.ops, strict=True) if o.phase != "optimizer")
        if self._optimizer[0] > peak_bytes:
            peak_bytes, phase = self._optimizer[0], "optimizer"
        forward_end = sum(1 for o in trace.ops if o.phase in ("forward", "loss"))
        return Candidate(
            decisions=chosen,
            peak_bytes=peak_bytes + self.fixed_bytes,
            step_seconds=seconds + self._optimizer[1] + priced.copy_seconds + self._host_seconds(chosen),
            recomputed_flops=sum(trace.signatures[o.signature].flops for o in trace.ops if o.replayed),
            saved_bytes=sum(
                s.nbytes for s in trace.storages if s.category == "saved" and s.alloc_op < forward_end <= s.free_op
            ),
            phase=phase,
            tensors=tuple(tensors[:8]),
            offloaded_bytes=sum(c.nbytes for c in trace.copies if c.kind == "out"),
        )

    def _host_seconds(self, chosen: Sequence[Decision]) -> float:
        """Returns what the bookkeeping of the regions takes; the solver charges the same."""
        num_calls = 0
        for decision in chosen:
            if decision.action == "recompute":
                repeats = 1 if decision.call is not None else self._num_calls.get(decision.path, 1)
                repeats = min(repeats, decision.calls or repeats)
                num_calls += repeats * (1 + len(decision.span))
        return num_calls * REGION_OVERHEAD_SECONDS

    # -- choosing -----------------------------------------------------------------------------------------------

    def decide(self, solver: Solver, solution: Solution) -> tuple[Decision, ...]:
        """Returns a solution's decisions, ready for the engine: one for every call where there is only one."""
        chosen = []
        for decision in to_decisions(solver.line, solution.choice):
            buffers: tuple[str, ...] = ()
            if decision.action == "recompute":
                paths = {decision.path, *decision.span}
                buffers = tuple(b for p in paths for b in self._buffers.get(p, ()))
            call = None if self._num_calls.get(decision.path, 1) == 1 else decision.call
            chosen.append(dataclasses.replace(decision, call=call, buffers=tuple(sorted(buffers))))
        is_tiled_view = any(solver is view for view in (*self.tiled_solvers, *self.tiled_moving_solvers))
        saves_only = self.tiled_solvers[-1] if is_tiled_view else self.solvers[-1]
        if "rederive" in self.actions and chosen and chosen[0].path and solver is not saves_only:
            chosen.insert(0, Decision(path="", action="save"))  # lineage is recorded: regions' inputs use it
        return self._with_tile(chosen) if is_tiled_view else tuple(chosen)

    def _with_tile(self, chosen: Sequence[Decision]) -> tuple[Decision, ...]:
        assert self.tiled is not None
        head = self.tiled.decision
        return (*(d for d in chosen if not f"{d.path}.".startswith(f"{head.path}.")), head)

    def smallest(self) -> Candidate:
        """Returns the plan with the smallest simulated peak that was found."""
        if self.loop is not None:
            self._shrink_loop()
            if self.loop.rules:
                return self._least()
        for solver in (*self.solvers, *self.moving_solvers, *self.tiled_solvers, *self.tiled_moving_solvers):
            self.simulate(self.decide(solver, solver.leanest()))
        for chosen in self._by_hand():
            self.simulate(chosen)
            if self.tiled is not None:
                self.simulate(self._with_tile(chosen))
        least = self._least()
        while is_tiled(least.decisions):  # smaller tiles as long as they lower the peak
            tokens = least.decisions[-1].tile_tokens or 1
            smaller = self.simulate(retile(least.decisions, max(tokens // 2, 1)))
            if smaller.peak_bytes > _WORTH_SMALLER_TILES * least.peak_bytes or tokens <= _FEWEST_TILE_TOKENS:
                break
            least = smaller
        return self._least()

    def _least(self) -> Candidate:
        return min([*self._seen.values(), self.plain], key=lambda c: (c.peak_bytes, c.step_seconds))

    def _by_hand(self) -> Iterator[tuple[Decision, ...]]:
        """Yields what people would try: every call of a kind that repeats, with and without rederive around it."""
        ambients: list[tuple[Decision, ...]] = [()]
        if "rederive" in self.actions:
            yield _EVERYWHERE
            ambients.append(_EVERYWHERE)
        if "recompute" not in self.actions:
            return
        trace = self.trace
        kinds: dict[str, list[int]] = {}
        for index, call in enumerate(trace.calls):
            if call.path and not call.refusal and call.replay_stop_op >= 0 and call.children:
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
                inside: Inside = "rederive" if ambient else "save"
                regions = ambient + tuple(Decision(path=p, action="recompute", inside=inside) for p in paths)
                yield regions
                if self.link is not None:
                    yield with_inputs_offloaded(regions)
                    yield ambient + tuple(Decision(path=p, action="offload", inside=inside) for p in paths)

    def fit(self, budget_bytes: int) -> Candidate | None:
        """Returns the fastest plan found whose simulated peak is at or under the budget, None if there is none."""
        if self.plain.peak_bytes <= budget_bytes:
            return self.plain
        if self.loop is not None:
            self._fit_loop(budget_bytes)
            if self.loop.rules:
                return self._fastest(budget_bytes)
        began = time.perf_counter()
        for solver in self.solvers:
            self._search(solver, budget_bytes, until=began + _SEARCH_SECONDS)
        began = time.perf_counter()
        for solver in self.moving_solvers:
            self._search(solver, budget_bytes, until=began + _MOVING_SECONDS)
        exact = min((c.step_seconds for c in self._fitting(budget_bytes) if not is_tiled(c.decisions)), default=None)
        if exact is None or exact > self.plain.step_seconds * (1 + _EQUAL_BITS_ARE_WORTH):
            began = time.perf_counter()
            for solver in self.tiled_solvers:
                self._search(solver, budget_bytes, until=began + _SEARCH_SECONDS)
            began = time.perf_counter()
            for solver in self.tiled_moving_solvers:
                self._search(solver, budget_bytes, until=began + _MOVING_SECONDS)
        self._try_by_hand(budget_bytes)
        fitting = self._fitting(budget_bytes)
        if not fitting:
            self.smallest()
            fitting = self._fitting(budget_bytes)
        return self._fastest(budget_bytes) if fitting else None

    def _fastest(self, budget_bytes: int) -> Candidate | None:
        fitting = self._fitting(budget_bytes)
        if not fitting:
            return None
        fastest = min(c.step_seconds for c in fitting)
        exact_ones = [c for c in fitting if not is_tiled(c.decisions)]
        exact = min((c.step_seconds for c in exact_ones), default=float("inf"))
        if exact <= fastest * (1 + _EQUAL_BITS_ARE_WORTH):
            fitting, fastest = exact_ones, exact
        # Within what timing can tell apart, the one that runs the least twice.
        equal = [c for c in fitting if c.step_seconds <= fastest * (1 + _SAME_TIME)]
        best = min(equal, key=lambda c: (c.recomputed_flops, c.step_seconds, len(c.decisions), c.peak_bytes))
        return self._with_larger_tiles(best, budget_bytes) if is_tiled(best.decisions) else best

    def _with_larger_tiles(self, candidate: Candidate, budget_bytes: int) -> Candidate:
        """Returns the plan with tiles as large as the budget leaves room for, if that is no slower."""
        assert self.tiled is not None
        head, tokens = self.tiled.head, candidate.decisions[-1].tile_tokens or 1
        room = (budget_bytes - candidate.peak_bytes) // _TILE_COPIES
        larger = head.tile_tokens(tokens * head.token_bytes + room)
        if larger < 2 * tokens:
            return candidate
        tried = self.simulate(retile(candidate.decisions, larger))
        fits = tried.peak_bytes <= budget_bytes and tried.step_seconds <= candidate.step_seconds
        return tried if fits else candidate

    def _chunk_loop(self, num_calls: int, *, inside: Inside, chunk: int | None = None) -> Candidate:
        assert self.loop is not None
        path = self.loop.path
        buffers = tuple(sorted(b for p, found in self._buffers.items() if p == path for b in found))
        return self.simulate((self.loop.decision(num_calls, chunk=chunk, inside=inside, buffers=buffers),))

    def _loop_insides(self) -> tuple[Inside, ...]:
        return ("save", "rederive") if "rederive" in self.actions else ("save",)

    def _fit_loop(self, budget_bytes: int) -> None:
        """Simulates the loop in chunks, with as few of its calls in them as the budget allows.

        The peak falls about evenly with each call that is chunked, so two tries find how many are needed.
        """
        assert self.loop is not None
        if self.loop.rules and "rederive" in self.actions and self.simulate(_EVERYWHERE).peak_bytes <= budget_bytes:
            return
        for inside in self._loop_insides():
            all_calls = self.loop.num_calls
            whole = self._chunk_loop(all_calls, inside=inside)
            if whole.peak_bytes > budget_bytes:
                continue
            per_call = (self.plain.peak_bytes - whole.peak_bytes) / all_calls
            wanted = (self.plain.peak_bytes - budget_bytes) / per_call
            for _ in range(_LOOP_TRIES):
                num_calls = math.ceil(wanted * _LOOP_MARGIN)
                if num_calls >= all_calls:
                    break
                over = self._chunk_loop(num_calls, inside=inside).peak_bytes - budget_bytes
                if over <= 0:
                    break
                wanted = num_calls + over / per_call
            if self.loop.rules:
                return
        if self.loop.rules and not self._fitting(budget_bytes):
            self._shrink_loop()

    def _shrink_loop(self) -> None:
        """Simulates the whole loop in smaller and larger chunks, as long as that lowers the peak."""
        assert self.loop is not None
        num_calls = self.loop.num_calls
        for inside in self._loop_insides():
            for factor in (2.0, 0.5):
                chunk = self.loop.chunk(num_calls)
                peak = self._chunk_loop(num_calls, inside=inside).peak_bytes
                while 1 <= int(chunk * factor) <= num_calls:
                    chunk = int(chunk * factor)
                    found = self._chunk_loop(num_calls, inside=inside, chunk=chunk).peak_bytes
                    if found >= peak:
                        break
                    peak = found

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
        return [c for c in self._seen.values() if c.peak_bytes <= budget_bytes]

    def _search(self, solver: Solver, budget_bytes: int, *, until: float) -> None:
        """Solves for a target, simulates, and moves the target by the gap, a few times.

        Args:
            until: when, by `perf_counter`, to be content with what fits already.
        """
        is_tiled_view = solver in (*self.tiled_solvers, *self.tiled_moving_solvers)
        target = budget_bytes
        fits_at: int | None = None
        for _ in range(_MAX_REPAIRS):
            # What rounds differently is no reason to stop looking for a plan that does not.
            rivals = [c for c in self._fitting(budget_bytes) if is_tiled_view or not is_tiled(c.decisions)]
            if time.perf_counter() > until and rivals:
                return
            solution = solver.solve(target - self.fixed_bytes)
            if solution.status == "infeasible":
                return
            best = min((c.step_seconds for c in rivals), default=float("inf"))
            base = self._seen[(self.tiled.decision,)] if self.tiled and is_tiled_view else self.plain
            if base.step_seconds + solution.extra_seconds >= best:
                return  # even by its own reckoning no faster than what fits already
            candidate = self.simulate(self.decide(solver, solution))
            gap = candidate.peak_bytes - budget_bytes
            if gap > 0:
                if fits_at is not None:
                    return
                target -= gap
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

    def prediction(self, candidate: Candidate) -> Prediction:
        """Returns what the plan's prediction says."""
        plain = self.plain
        return Prediction(
            peak_bytes=candidate.peak_bytes,
            plain_peak_bytes=plain.peak_bytes,
            step_seconds=candidate.step_seconds,
            plain_step_seconds=plain.step_seconds,
            recomputed_flops=candidate.recomputed_flops,
            plain_flops=sum(self.trace.signatures[o.signature].flops for o in self.trace.ops),
            saved_bytes=candidate.saved_bytes,
            plain_saved_bytes=plain.saved_bytes,
            phase=candidate.phase,
            tensors=candidate.tensors,
            cost_source=self.priced.source,
            offloaded_bytes=candidate.offloaded_bytes,
            num_all_gathers=self.priced.num_all_gathers,
        )

    def plan(self, candidate: Candidate, *, budget_bytes: int, budget_text: str, device: str) -> Plan:
        """Returns the plan for people and for disk."""
        from recoup import __version__

        modules = dict(self.spec.model.named_modules(remove_duplicate=False))
        paths = dict.fromkeys(p for d in candidate.decisions for p in (d.path, *d.span))
        notes = []
        if self.trace.source == "real":
            notes.append(f"captured from a real step: {self.trace.reason}")
        if "no loss was given" in self.trace.grad_mode_default_loss:
            notes.append(f"the loss is {self.trace.grad_mode_default_loss}")
        if self.plain.peak_bytes <= budget_bytes:
            notes.append("the unplanned step fits: nothing is changed")
        if caching_paths(modules, [d.path for d in candidate.decisions if d.action == "recompute"]):
            notes.append("the key-value cache is off while this plan trains (use_cache); evaluation keeps it")
        notes += self._tile_notes(candidate)
        if candidate.offloaded_bytes and self.link is not None:
            notes.append(
                f"offload moves {format_bytes(candidate.offloaded_bytes)} out and back each step and needs as "
                f"much host memory; at "
                f"{self.link.out_bytes / 1e9:.3g} GB/s out and {self.link.back_bytes / 1e9:.3g} back "
                f"({self.link.source})"
            )
        return Plan(
            decisions=candidate.decisions,
            budget_bytes=budget_bytes,
            budget_text=budget_text,
            device=device,
            model_class=self.trace.model_class,
            fingerprint=self.trace.fingerprint,
            structure=tuple((path, type(modules[path]).__name__) for path in paths),
            predicted=self.prediction(candidate),
            notes=tuple(notes),
            versions=(("recoup", __version__), ("torch", str(torch.__version__))),
        )

    def _tile_notes(self, candidate: Candidate) -> list[str]:
        """Returns what each action gives by itself, and what tiles cost in exactness."""
        if self.tiled is None or not is_tiled(candidate.decisions):
            return []
        tile = (self.tiled.decision,)
        alone = f"tile alone peaks at {format_bytes(self._seen[tile].peak_bytes)}"
        both = self._seen.get((*_EVERYWHERE, *tile))
        if both is not None:
            alone = (
                f"rederive alone peaks at {format_bytes(self._seen[_EVERYWHERE].peak_bytes)}, {alone}, both at "
                f"{format_bytes(both.peak_bytes)}"
            )
        regions = sum(d.action == "recompute" for d in candidate.decisions)
        if regions:
            alone += f"; {regions} regions recomputed give the rest, {format_bytes(candidate.peak_bytes)}"
        return [
            f"{alone} (plain {format_bytes(self.plain.peak_bytes)})",
            "tile sums in another order: gradients are equal up to rounding, not bit for bit",
        ]


def check_actions(actions: Any) -> tuple[str, ...]:
    """Returns the actions as a tuple.

    Raises:
        UsageError: if one is not known.
    """
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
