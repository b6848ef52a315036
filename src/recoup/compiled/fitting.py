"""A byte budget for a compiled step: recorded, planned, compiled, measured, corrected, and proved.

1. The step is compiled as torch does it, every joint graph kept as plain data, and its peak measured.
2. The choices for all graphs are laid out once (`frontier.py`, `combine.py`). Predictions are corrected by how
   far that of torch's own choice is from its measured peak.
3. The fastest choice predicted to fit is compiled and measured. If it is over, what was measured corrects the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recoup import _torch, progress
from recoup.capture.optimizer import OptimizerLike
from recoup.capture.step import Objective
from recoup.compiled.combine import Combination, combinations, combined
from recoup.compiled.frontier import choices
from recoup.compiled.recording import CompileOptions, Division, Recording
from recoup.errors import InfeasibleBudget, StepError, UsageError
from recoup.evidence.gradients import Comparison, StepResult, compare, on_host, rounding_bound
from recoup.evidence.memory import measure_peak, meter_name
from recoup.evidence.speed import time_ratio
from recoup.evidence.step_bench import StepBench
from recoup.ir.compiled_plan import CompiledGraph, CompiledPlan
from recoup.ir.evidence import Evidence
from recoup.units import format_bytes, parse_budget

_MOST_PLANS = 4  # compiled and measured for one budget: each takes as long as torch takes to compile
_TIMED_SECONDS = 20.0  # interleaved pairs end then


class CompiledModel:
    """A model compiled in place by a plan; `remove` has it run as before."""

    def __init__(self, model: nn.Module, call: Any) -> None:
        self.model = model
        self.call = call
        self._before = _torch.compiled_call(model)
        _torch.set_compiled_call(model, call)

    def remove(self) -> None:
        """Takes the compiled call off; what was there before is there again."""
        if _torch.compiled_call(self.model) is self.call:
            _torch.set_compiled_call(self.model, self._before)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Runs the model as before inside the block."""
        with _torch.calling(self.model, self._before):
            yield


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
        self._plain: Any = None
        self._notes: list[str] = []
        self._calls: tuple[str, ...] = ()

    def fit(self, budget: int | str, *, free_bytes: int | None, timed: bool) -> CompiledFit:
        """Returns the model compiled in place, with plan and evidence."""
        bench, model = self.bench, self.model
        with bench.optimizing():
            held_bytes = bench.held_bytes()
            progress.advance("compiling the step as torch does")
            self._plain = self.recording.compile(model)
            # The first step compiles.
            self._run(self._plain)
            self.recording.calls.clear()
            plain_peak = self._peak(self._plain, held_bytes)
        calls = self._calls = tuple(self.recording.calls)
        if not calls:
            raise UsageError(
                f"torch.compile found no graph with a backward in {type(model).__name__}: nothing to plan. Check "
                "TORCH_LOGS=graph_breaks, or plan the eager step (`compiled=False`)."
            )
        budget_bytes = parse_budget(budget, plain_peak_bytes=plain_peak, free_bytes=free_bytes)
        steps = {name: r.view.step for name, r in self.recording.graphs.items() if name in calls}
        torch_choice = combined(steps, calls, {name: self.recording.graphs[name].torch_choice for name in steps})
        if plain_peak <= budget_bytes:
            self._notes.append("the step as torch compiles it is within the budget")
            return self._prove(torch_choice, self._plain, plain_peak, plain_peak, plain_peak, budget_bytes, timed)
        progress.advance("planning compiled graphs")
        options = {name: [*choices(step), self.recording.graphs[name].torch_choice] for name, step in steps.items()}
        found = combinations(steps, calls, options)
        correction = plain_peak - torch_choice.peak_bytes
        measured: dict[int, int] = {}
        for _ in range(_MOST_PLANS):
            at = self._next(found, measured, correction, budget_bytes)
            if at is None:
                break
            predicted = found[at].peak_bytes + correction
            progress.advance(f"compiling the step for {format_bytes(predicted)}")
            division = Division(self.options, dict(found[at].chosen), budget_bytes, above=correction)
            call = division.compile(model)
            with bench.optimizing():
                self._run(call)
                measured[at] = self._peak(call, held_bytes)
            if division.new:
                self._notes.append(f"{len(division.new)} graphs were other ones when compiled again")
            if measured[at] <= budget_bytes:
                return self._prove(found[at], call, plain_peak, measured[at], predicted, budget_bytes, timed)
            correction = max(correction, measured[at] - found[at].peak_bytes)
        least = min([found[-1].peak_bytes + correction, plain_peak, *measured.values()])
        raise InfeasibleBudget(
            f"Budget {format_bytes(budget_bytes)} is below the smallest reachable peak {format_bytes(least)} "
            f"({least} bytes) of {type(model).__name__} compiled by {self.options.backend}: "
            f"{len(measured)} plans were compiled and measured. Use a larger budget or a smaller batch.",
            budget_bytes=budget_bytes,
            minimum_bytes=least,
            phase="backward",
            tensors=(),
        )

    @staticmethod
    def _next(found: list[Combination], measured: dict[int, int], correction: int, budget_bytes: int) -> int | None:
        """Returns the fastest choice that was not measured and is predicted to fit; None if there is none."""
        fitting = [i for i, c in enumerate(found) if i not in measured and c.peak_bytes + correction <= budget_bytes]
        if fitting:
            return min(fitting, key=lambda i: (found[i].seconds, i))
        least = len(found) - 1  # predictions may be too high: the smallest is worth a try
        return least if least not in measured else None

    def _run(self, call: Any) -> None:
        self.bench.restore()
        try:
            with _torch.calling(self.model, call), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what torch reads of its own tensors while it compiles
                self.bench.step()
        except torch._dynamo.exc.TorchDynamoException as error:
            raise StepError(
                f"torch.compile failed on {type(self.model).__name__}: {' '.join(str(error).split())[:400]}. The model "
                "is as it was. Compile it without a plan to see whether it compiles at all."
            ) from error
        finally:
            self.bench.restore()

    def _peak(self, call: Any, held_bytes: int) -> int:
        self.bench.restore()
        with _torch.calling(self.model, call):
            peak = measure_peak(self.bench.step, device=self.bench.device, held_bytes=held_bytes)
        self.bench.restore()
        return peak

    def _result(self, call: Any) -> StepResult:
        self.bench.restore()
        with _torch.calling(self.model, call):
            result = self.bench.step(take=True)
        assert result is not None
        result = on_host(result)
        self.bench.restore()
        return result

    def _prove(
        self, made: Combination, call: Any, plain_peak: int, peak: int, predicted: int, budget_bytes: int, timed: bool
    ) -> CompiledFit:
        """Returns the fit with its evidence: compiled plain beside compiled planned, and both beside eager."""
        progress.advance("comparing compiled steps")
        comparison = self._compare(call)
        ratio = spread = None
        if timed and call is not self._plain:
            with self.bench.optimizing():
                ratio, spread = self._time(call)
        evidence = Evidence(
            peak_bytes=peak,
            baseline_peak_bytes=plain_peak,
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
            plan=self._plan(made, plain_peak, predicted, budget_bytes, is_torch=call is self._plain),
            applied=CompiledModel(self.model, call),
            evidence=evidence,
        )

    def _compare(self, call: Any) -> Comparison:
        """Compares with the compiled plain step; where bits differ, by how far that one is from eager's."""
        # Eager first: the first step is watched by a dispatch mode, under which compiled code would run op by op.
        eager, plain, planned = self._result(None), self._result(self._plain), self._result(call)
        own = compare(eager, plain, bound=1.0)
        comparison = compare(plain, planned)
        if comparison.gradients_equal and comparison.loss_equal:
            self._notes.append(
                "gradients have the bits of the step as torch compiles it, which is "
                + ("bit-equal to eager's" if own.gradients_equal else f"{own.max_gradient_error:.1e} from eager's")
            )
            return comparison
        # Capped by what rounding can do: with dropout eager draws other numbers, and is as far off as it likes.
        bound = rounding_bound(plain, None, max(own.max_gradient_error, own.loss_error))
        comparison = compare(plain, planned, bound=bound)
        self._notes.append(
            f"kernels differ: gradients are {comparison.max_gradient_error:.1e} from those of the step as torch "
            f"compiles it, which are {own.max_gradient_error:.1e} from eager's"
        )
        return comparison

    def _time(self, call: Any) -> tuple[float, float]:
        def runner(of: Any) -> Any:
            def run() -> None:
                with _torch.calling(self.model, of):
                    self.bench.step()

            return run

        return time_ratio(
            runner(self._plain),
            runner(call),
            device=self.bench.device,
            max_seconds=_TIMED_SECONDS,
            before=self.bench.restore,
        )

    def _plan(
        self, made: Combination, plain_peak: int, predicted: int, budget_bytes: int, *, is_torch: bool
    ) -> CompiledPlan:
        graphs = []
        for name in dict.fromkeys(self._calls):
            view, chosen = self.recording.graphs[name].view, made.chosen.get(name)
            if chosen is None:
                continue
            again = [at for at in chosen.order if at < view.step.num_forward and view.step.ops[at].outputs]
            graphs.append(
                CompiledGraph(
                    fingerprint=name,
                    num_calls=self._calls.count(name),
                    num_ops=view.step.num_forward,
                    held=tuple(view.holders[v].name for v in sorted(chosen.held)),
                    held_bytes=chosen.held_bytes,
                    rerun=tuple(view.nodes[at].name for at in again),
                    rerun_seconds=chosen.seconds,
                    is_torch=is_torch,
                )
            )
        return CompiledPlan(
            model_class=type(self.model).__name__,
            backend=self.options.backend,
            torch_version=torch.__version__,
            budget_bytes=budget_bytes,
            predicted_peak_bytes=predicted,
            plain_peak_bytes=plain_peak,
            graphs=tuple(graphs),
            notes=tuple(self._notes),
        )
