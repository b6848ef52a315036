"""A byte budget for a compiled step: recorded, planned, compiled, measured, corrected, and proved.

1. The step is compiled as torch does it, every joint graph kept as plain data, and its peak measured.
2. The choices for all graphs are laid out once (`frontier.py`, `combine.py`). Predictions are corrected by how
   far that of torch's own choice is from its measured peak.
3. The fastest choice predicted to fit is compiled and measured, which corrects predictions, until it is a measured one.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import nn

from recoup import _torch, progress
from recoup._allocation import HostRoom
from recoup.capture.optimizer import OptimizerLike
from recoup.capture.snapshot import random_state
from recoup.capture.step import Objective
from recoup.compiled.combine import Combination, StepLevels, combinations, combined
from recoup.compiled.division import Division, Variant, by_module
from recoup.compiled.frontier import choices
from recoup.compiled.in_place import CompiledModel, calling
from recoup.compiled.levels import meter_levels
from recoup.compiled.planned import PlannedChoices, as_planned
from recoup.compiled.recording import (
    Calls,
    CompileOptions,
    Recording,
    divisible_graphs,
    metered,
    paths_of,
    planned_graphs,
    surroundings,
)
from recoup.compiled.schedule import Timeline, timeline
from recoup.cost.measured import MeasuredCost
from recoup.errors import InfeasibleBudget, StepError, UsageError
from recoup.evidence.gradients import Comparison, StepResult, compare, on_host, rounding_bound, same_random_state
from recoup.evidence.memory import measure_peak, meter_name
from recoup.evidence.speed import time_ratio
from recoup.evidence.step_bench import StepBench
from recoup.ir.compiled_plan import CompiledPlan
from recoup.ir.evidence import Evidence
from recoup.thresholds import ESTIMATE_SHARE, MEASURING_SECONDS, MOST_TRIES
from recoup.units import format_bytes, is_minimum, parse_budget


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompiledFit:
    """A model compiled within a budget, and proved.

    Attributes:
        plan: what is held. applied: the handle that undoes it; nothing is in place if `evidence.ok` is False.
        evidence: measured. `baseline` is the step as torch compiles it.
    """

    plan: CompiledPlan
    applied: CompiledModel
    evidence: Evidence

    def __str__(self) -> str:
        return f"{self.plan}\n\n{self.evidence}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A compiled choice: its measured peak, and the one that was predicted before it was compiled."""

    calls: Calls
    peak_bytes: int
    predicted_bytes: int


class CompiledFitting:
    """The steps that fit one compiled model into a budget."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        objective: Objective,
        optimizer: OptimizerLike | None,
        options: CompileOptions,
    ) -> None:
        self.model = model
        self.options = options
        self.bench = StepBench(model, batch, objective, optimizer)
        self.recording = Recording(options)
        self.plain_peak_bytes = 0
        self._plain: Calls = {}
        self._levels: StepLevels | None = None
        self._cost = MeasuredCost(self.bench.device)
        self.torch_choice = self.last_choice = Combination(chosen=(), peak_bytes=0, seconds=0.0)
        self._notes: list[str] = []
        self._calls: tuple[str, ...] = ()
        self._callers: tuple[nn.Module, ...] = ()
        self._variants: dict[Any, Variant] = {}
        self._found: list[Combination] = []
        self._planned: dict[int, int] = {}
        self._measured: dict[int, Measured] = {}

    def compile_plain(self) -> Measured:
        """Compiles the step as torch does; keeps its graphs, and returns it with its measured peak."""
        bench, model = self.bench, self.model
        with bench.optimizing():
            self._held_bytes = bench.held_bytes()
            progress.advance("compiling the step as torch does")
            plain = self.recording.compile(model)
            # The first step compiles.
            self._run(plain)
            self.recording.forget_calls()
            peak = self._peak(plain)
        self._calls, self._callers = tuple(self.recording.calls), tuple(self.recording.callers)
        if not self._calls:
            raise UsageError(
                f"torch.compile found no graph with a backward in {type(model).__name__}: nothing to plan. Check "
                "TORCH_LOGS=graph_breaks, or plan the eager step (`compiled=False`)."
            )
        chosen = tuple(self.recording.graphs[name].torch_choice for name in self._calls)
        self.torch_choice = Combination(chosen=chosen, peak_bytes=peak, seconds=sum(t.seconds for t in chosen))
        return Measured(calls=plain, peak_bytes=peak, predicted_bytes=peak)

    def record(self) -> int:
        """Compiles the step as torch does, once; makes ready to plan, and returns its measured peak in bytes."""
        if self._plain:
            return self.plain_peak_bytes
        made = self.compile_plain()
        plain, calls, self.plain_peak_bytes = made.calls, self._calls, made.peak_bytes
        for name in dict.fromkeys(calls):
            graph = metered(self.recording.graphs[name], self._cost)
            if (levels := self.recording.planned.get(name)) is not None:
                graph = dataclasses.replace(graph, torch_choice=as_planned(graph.torch_choice, levels, self._cost))
            self.recording.graphs[name] = graph
        chosen = [self.recording.graphs[name].torch_choice for name in calls]
        with self.bench.optimizing(), calling(plain):
            self._levels = meter_levels(self.bench.step, device=self.bench.device, calls=calls, chosen=chosen)
        self.torch_choice = combined(self.recording.steps, calls, chosen, self._levels)
        self._plain = plain
        return self.plain_peak_bytes

    def _planned_peak(self, chosen: Sequence[Timeline], planned: PlannedChoices) -> int | None:
        """Returns the peak of a step by the compiler's own plan of its graphs; None if that is not known of all."""
        made = list(zip(self._calls, chosen, strict=True))
        if not all(call in planned and call[0] in self.recording.planned for call in made):
            return None
        known = {call: as_planned(call[1], planned[call], self._cost) for call in dict.fromkeys(made)}
        own = combined(self.recording.steps, self._calls, [known[call] for call in made], self._levels)
        return self.plain_peak_bytes + own.peak_bytes - self.torch_choice.peak_bytes

    def combinations(self) -> list[Combination]:
        """Returns what may be chosen, by falling peak and rising seconds; computed once."""
        if not self._found:
            progress.advance("planning compiled graphs")
            steps, options = self.recording.steps, dict[str, list[Timeline]]()
            for name in dict.fromkeys(self._calls):
                around = surroundings(self.recording.graphs, self._calls, name)
                held = self.recording.graphs[name].torch_choice.held
                options[name] = [*choices(steps[name], around), timeline(steps[name], held)]
            divisible = divisible_graphs(self._calls, self._callers)
            self._found = combinations(steps, self._calls, options, self._levels, divisible=divisible)
        return self._found

    def flops(self, made: Combination) -> int:
        """Returns the FLOPs of a step by a choice: of its graphs, with what runs again."""
        steps = self.recording.steps
        return sum(steps[name].flops(t.order) for name, t in zip(self._calls, made.chosen, strict=True))

    def fit(self, budget: int | str, *, free_bytes: int | None, timed: bool) -> CompiledFit:
        """Returns the model compiled in place, with plan and evidence; may be called for one budget after another."""
        plain_peak, model = self.record(), self.model
        self._notes = []
        least = self.least() if is_minimum(budget) else 0
        budget_bytes = parse_budget(budget, plain_peak_bytes=plain_peak, free_bytes=free_bytes, minimum_bytes=least)
        if plain_peak <= budget_bytes:
            self._notes.append("the step as torch compiles it is within the budget")
            return self._prove(self.torch_choice, self._plain, plain_peak, plain_peak, budget_bytes, timed)
        self._measure_within(budget_bytes)
        found, measured = self.combinations(), self._measured
        if all(made.peak_bytes > budget_bytes for made in measured.values()):
            least = self.least()  # measured, so it may fit after all
        if fitting := [i for i, made in measured.items() if made.peak_bytes <= budget_bytes]:
            made = measured[at := min(fitting, key=lambda i: (found[i].seconds, i))]
            return self._prove(found[at], made.calls, made.peak_bytes, made.predicted_bytes, budget_bytes, timed)
        raise InfeasibleBudget(
            f"Budget {format_bytes(budget_bytes)} is below the smallest reachable peak {format_bytes(least)} "
            f"({least} bytes) of {type(model).__name__} compiled by {self.options.backend}: "
            f"{len(measured)} of its plans compiled and measured. Use a larger budget or a smaller batch.",
            budget_bytes=budget_bytes,
            minimum_bytes=least,
            phase="backward",
            tensors=(),
        )

    def least(self) -> int:
        """Returns the smallest peak that is reached: that of a choice which was measured."""
        found = self.combinations()
        for _ in range(MOST_TRIES):
            least = min(self.plain_peak_bytes, *map(self._predicted, range(len(found))))
            self._measure_within(least)
            if any(made.peak_bytes <= least for made in self._measured.values()):
                break
        return min(self.plain_peak_bytes, *(made.peak_bytes for made in self._measured.values()))

    def _measure_within(self, budget_bytes: int) -> None:
        """Measures until the fastest choice that should fit is a measured one: a lower budget then finds no faster.

        Where kernels are fused, the compiler plans a choice before it is compiled.
        """
        measured, tries = self._measured, MOST_TRIES
        for _ in range(2 * MOST_TRIES):
            at = self._next(budget_bytes)
            if at is None or at in measured or not tries:
                break
            progress.advance(f"compiling the step for {format_bytes(self._predicted(at))}")
            if self.options.fuses and at not in self._planned:
                self._planned[at] = self._plan_of_compiler(at, budget_bytes)
            else:
                measured[at] = self._compiled(at, budget_bytes)
                tries -= 1

    def _predicted(self, at: int) -> int:
        """Returns the peak of a choice: as measured, as the compiler planned it, or simulated, corrected alike."""
        exact = self._planned | {i: made.peak_bytes for i, made in self._measured.items()}
        if at in exact:
            return exact[at]
        known = {self.torch_choice.peak_bytes: self.plain_peak_bytes}
        known |= {self._found[i].peak_bytes: peak for i, peak in exact.items()}
        simulated = sorted(known)
        peak = self._found[at].peak_bytes
        return round(peak + numpy.interp(peak, simulated, [known[p] - p for p in simulated]))

    def _division(self, at: int, budget_bytes: int, *, runs: bool) -> Division:
        made = self._found[at]
        own, above = by_module(self._calls, self._callers, made.chosen), self._predicted(at) - made.peak_bytes
        return Division(self.options, own, budget_bytes, above=above, runs=runs, compiled=self._variants)

    def _plan_of_compiler(self, at: int, budget_bytes: int) -> int:
        """Returns the peak of a choice as the compiler plans its code, of which nothing is compiled or run."""
        division = self._division(at, budget_bytes, runs=False)
        call = division.compile(self.model)
        with self.bench.optimizing():
            self._run(call)
        peak = self._planned_peak(self._found[at].chosen, division.planned)
        return self._predicted(at) if peak is None else peak

    def _compiled(self, at: int, budget_bytes: int) -> Measured:
        """Returns a choice compiled, and its measured peak."""
        predicted = self._predicted(at)
        division = self._division(at, budget_bytes, runs=True)
        call = division.compile(self.model)
        with self.bench.optimizing():
            self._run(call)
            peak = self._peak(call)
        if division.num_new:
            self._notes.append(f"{division.num_new} graphs were other ones when compiled again")
        return Measured(calls=call, peak_bytes=peak, predicted_bytes=predicted)

    def _next(self, budget_bytes: int) -> int | None:
        """Returns the fastest choice that is measured, or predicted, to fit; None if there is none."""
        found = self.combinations()
        peaks = [self._predicted(i) for i in range(len(found))]
        fitting = [i for i, peak in enumerate(peaks) if peak <= budget_bytes]
        if fitting:
            return min(fitting, key=lambda i: (found[i].seconds, i))
        # Predictions may be too high: what as simulated misses by little is worth a try, all of it if only planned.
        known, most = self._planned.keys() | self._measured.keys(), budget_bytes / (1 - ESTIMATE_SHARE)
        above = self.plain_peak_bytes - self.torch_choice.peak_bytes
        left = [i for i in range(len(found)) if i not in known and min(peaks[i], found[i].peak_bytes + above) <= most]
        if not self.options.fuses:
            left = [i for i in left if i == len(found) - 1]
        return min(left, key=lambda i: (peaks[i], -i), default=None)

    def _run(self, call: Calls) -> None:
        self.bench.restore()
        try:
            with calling(call), _torch.compiling_again(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what torch reads of its own tensors while it compiles
                self.bench.step()
        except torch._dynamo.exc.TorchDynamoException as error:
            raise StepError(
                f"torch.compile failed on {type(self.model).__name__}: {' '.join(str(error).split())[:400]}. The model "
                "is as it was. Compile it without a plan to see whether it compiles at all."
            ) from error
        finally:
            self.bench.restore()

    def _peak(self, call: Calls) -> int:
        self.bench.restore()
        with calling(call):
            peak = measure_peak(self.bench.step, device=self.bench.device, held_bytes=self._held_bytes)
        self.bench.restore()
        return peak

    def _result(self, call: Calls) -> StepResult:
        self.bench.restore()
        with calling(call):
            result = self.bench.step(take=True)
        assert result is not None
        result = on_host(result, HostRoom())
        self.bench.restore()
        return result

    def _prove(
        self, made: Combination, call: Calls, peak: int, predicted: int, budget_bytes: int, timed: bool
    ) -> CompiledFit:
        """Returns the fit with its evidence: compiled plain beside compiled planned, and both beside eager."""
        self.last_choice = made
        progress.advance("comparing compiled steps")
        comparison = self._compare(call)
        ratio = spread = None
        if timed and call is not self._plain:
            with self.bench.optimizing():
                ratio, spread = self._time(call)
        evidence = Evidence(
            peak_bytes=peak,
            baseline_peak_bytes=self.plain_peak_bytes,
            predicted_peak_bytes=predicted,
            budget_bytes=budget_bytes,
            gradients_equal=comparison.gradients_equal,
            max_gradient_error=comparison.max_gradient_error,
            loss_equal=comparison.loss_equal,
            buffers_equal=comparison.buffers_equal,
            rng_equal=comparison.rng_equal,
            same_gradient_set=comparison.same_gradient_set,
            time_ratio=ratio,
            time_spread=spread,
            num_regions_replayed=0,
            num_rederived=0,
            differences=comparison.differences,
            meter=meter_name(self.bench.device),
            notes=tuple(self._notes),
            error_bound=comparison.error_bound,
            loss_error=comparison.loss_error,
        )
        return CompiledFit(
            plan=self._plan(made, predicted, budget_bytes, is_torch=call is self._plain),
            applied=CompiledModel(self.model, call),
            evidence=evidence,
        )

    def compare_plain(self, call: Calls) -> Comparison:
        """Compares a step with that of `record`, bit by bit."""
        return compare(self._result(self._plain), self._result(call))

    def _compare(self, call: Calls) -> Comparison:
        """Compares with the compiled plain step; where bits differ, by how far that one is from eager's."""
        # Eager first: the first step is watched by a dispatch mode, under which compiled code would run op by op.
        eager, plain, planned = self._result(dict.fromkeys(self._plain)), self._result(self._plain), self._result(call)
        own = compare(eager, plain, bound=1.0)
        comparison = compare(plain, planned)
        if comparison.gradients_equal and comparison.loss_equal:
            self._notes.append(
                "gradients have the bits of the step as torch compiles it, which is "
                + ("bit-equal to eager's" if own.gradients_equal else f"{own.max_gradient_error:.1e} from eager's")
            )
            return comparison
        is_random = not same_random_state(eager.random_state, random_state())  # that of the step's begin is back
        dtypes = [self.recording.graphs[name].view.coarsest_dtype() for name in dict.fromkeys(self._calls)]
        coarsest = max((d for d in dtypes if d is not None), key=lambda d: torch.finfo(d).eps, default=None)
        bound = rounding_bound(plain, coarsest, max(own.max_gradient_error, own.loss_error), is_random=is_random)
        comparison = compare(plain, planned, bound=bound)
        self._notes.append(
            f"kernels differ: gradients are {comparison.max_gradient_error:.1e} from those of the step as torch "
            f"compiles it, which are {own.max_gradient_error:.1e} from eager's"
        )
        return comparison

    def _time(self, call: Calls) -> tuple[float, float]:
        def run(calls: Calls) -> None:
            with calling(calls):
                self.bench.step()

        return time_ratio(
            functools.partial(run, self._plain),
            functools.partial(run, call),
            device=self.bench.device,
            max_seconds=MEASURING_SECONDS,
            before=self.bench.restore,
        )

    def _plan(self, made: Combination, predicted: int, budget_bytes: int, *, is_torch: bool) -> CompiledPlan:
        paths = paths_of(self.model, self._callers)
        return CompiledPlan(
            model_class=type(self.model).__name__,
            backend=self.options.backend,
            torch_version=torch.__version__,
            budget_bytes=budget_bytes,
            predicted_peak_bytes=predicted,
            plain_peak_bytes=self.plain_peak_bytes,
            graphs=planned_graphs(self.recording.graphs, self._calls, paths, made.chosen, is_torch=is_torch),
            notes=tuple(self._notes),
        )
