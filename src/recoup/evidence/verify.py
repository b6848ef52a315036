"""Runs the plain and the planned step from the same state and compares everything.

Both start from the same weights, buffers, attributes and random streams. One planned step keeps what regions drop and
compares every replay with it (`replay_audit.py`); one plain and one planned step are run under the meter and compared
value by value (with an optimizer, whose step counts too, they are metered apart); time is taken over interleaved pairs.
Nothing of the model changes: weights, buffers, `.grad`s, flags and streams are put back.

[Note: memory of a verification] A plan is proved where the plain step does not fit:
1. What has to be kept for a comparison is one copy of the gradients. It is gone before an optimizer steps, and a copy
   of the weights that optimizers change takes its place. Both are in host memory for a model on a GPU.
2. A plain step that cannot fit runs with what it saves for backward moved to host memory or, on a CPU, to a temporary
   file: the same kernels on the same bytes. So do the audit's originals. It is not metered or timed then.
3. Where even that fails, the values are compared on half the batch, and on half of that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from recoup._allocation import available_bytes, is_allocation_failure
from recoup._pytree import first_half, iterate_tensors, num_rows
from recoup.capture.optimizer import OptimizerLike, OptimizerStep, prepare_optimizer
from recoup.capture.snapshot import Snapshot, parameters_outside, untouched
from recoup.capture.step import Objective, leaves_of
from recoup.errors import RecoupError, StepError, StepOutOfMemory, UsageError
from recoup.evidence.gradients import (
    NOISE_FACTOR,
    Comparison,
    StepResult,
    compare,
    on_host,
    rounding_bound,
    rounding_noise,
    take_result,
)
from recoup.evidence.memory import measure_peak, meter_name, storage_bytes
from recoup.evidence.replay_audit import MOVED_BYTES, Audit
from recoup.evidence.speed import time_ratio
from recoup.ir.evidence import Evidence
from recoup.ir.plan import Plan
from recoup.runtime import execution_context, scan_bytes
from recoup.runtime.apply import apply_decisions, find_patches, plain
from recoup.runtime.offload.saved_tensor import offload
from recoup.runtime.offload.transport import Transport, make_transport
from recoup.units import format_bytes

_Result = TypeVar("_Result")


class StepBench:
    """A model in a fixed state, on which steps are run and taken back."""

    def __init__(self, model: nn.Module, batch: Any, objective: Objective, optimizer: OptimizerLike | None) -> None:
        self.model = model
        self.batch = batch
        self.objective = objective
        self.device = next(model.parameters()).device
        self._before = Snapshot(model, batch, objective.functions)
        self._outside = parameters_outside(model, self._before)
        self._is_watched = False
        self._optimizes = optimizer is not None
        self.optimizer: OptimizerStep | None = None
        if optimizer is not None:
            parameters = [p for p in model.parameters() if isinstance(p, nn.Parameter)]
            with self.optimizing():
                new_of: dict[int, Any] = {id(p): p for p in [*parameters, *self._outside.values()]}
                self.optimizer = prepare_optimizer(optimizer, new_of, parameters, foreach=False)

    @property
    def trainable_bytes(self) -> int:
        """Bytes of the gradients of one step."""
        return storage_bytes(p for p in self.model.parameters() if p.requires_grad)

    @contextlib.contextmanager
    def optimizing(self) -> Iterator[None]:
        """Has `restore` put back, inside the block and at its end, weights that an optimizer changes."""
        changed = [p for p in [*self.model.parameters(), *self._outside.values()] if self._optimizes]
        with self._before.tensors.copied(p for p in changed if p.requires_grad):
            try:
                yield
            finally:
                self.restore()

    def restore(self) -> None:
        """Puts everything that a step can reach back; no tensor has a gradient then."""
        self._before.restore()
        torch.clear_autocast_cache()  # inside the user's autocast it holds casts of weights as they were
        self._before.tensors.clear_gradients()
        self.objective.prepare(self.model)

    def held_bytes(self) -> int:
        """Returns the bytes that are there before a step: weights, buffers, optimizer state, batch."""
        state = list(self.optimizer.state_tensors()) if self.optimizer is not None else []
        tensors = [*self.model.parameters(), *self.model.buffers(), *iterate_tensors(self.batch), *state]
        tensors += self._before.tensors.touched()
        estimated_bytes = self.optimizer.estimated_bytes if self.optimizer is not None else 0
        estimated_bytes += self.trainable_bytes if self.objective.accumulates else 0
        return storage_bytes(t for t in tensors if t.device.type == self.device.type) + estimated_bytes

    def step(
        self,
        *,
        take: bool = False,
        times: float | None = None,
        aside: Transport | None = None,
        meter: Callable[[Callable[[], Any]], Any] = lambda run: run(),
    ) -> StepResult | None:
        """Runs one training step; with `take`, returns what it left behind (and runs no optimizer step).

        The first with `take` is watched: what it writes is copied before, and so is put back after any other step too.

        Args:
            times: the loss is multiplied by it before backward. aside: where saved tensors are moved to.
            meter: calls forward and backward.
        """
        losses: list[torch.Tensor] = []
        with self._before.watching() if take and not self._is_watched else contextlib.nullcontext():
            meter(lambda: losses.append(self._loss_after_backward(times, aside)))
        loss = losses.pop()
        if take:
            self._is_watched = True
            return take_result(self.model, loss, self._before, self._outside)
        del loss
        self.step_optimizer()
        return None

    def step_optimizer(self) -> None:
        """Steps the optimizer, if there is one."""
        if self.optimizer is None:
            return
        try:
            self.optimizer.step(self._again)
        except Exception as error:  # the user's optimizer may raise anything
            if isinstance(error, RecoupError) or is_allocation_failure(error):
                raise
            raise StepError(
                f"The step of {type(self.optimizer.optimizer).__name__} failed on this model's gradients: "
                f"{type(error).__name__}: {error}. Build it from the parameters it is for, and pass that as optimizer=."
            ) from error

    def _again(self) -> torch.Tensor:
        self._before.tensors.clear_gradients()
        self.objective.prepare(self.model)
        return self._loss_after_backward()

    def _loss_after_backward(self, times: float | None = None, aside: Transport | None = None) -> torch.Tensor:
        moving: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if aside is not None:
            moving = offload(self.model, transport=aside, min_bytes=MOVED_BYTES)
        with torch.enable_grad():
            with moving:
                loss = self.objective.run(self.model, self.batch)
                loss = loss if times is None else loss * times
            for leaf in leaves_of(loss) if not self._is_watched else ():
                self._before.tensors.add("a tensor that the loss reaches", leaf)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def verify_plan(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    *,
    objective: Objective = Objective(),  # noqa: B008
    optimizer: OptimizerLike | None = None,
    timed: bool = True,
    max_seconds: float = 30.0,
) -> Evidence:
    """Returns the evidence for `plan` on `model`.

    Args:
        plan: applied already, or not: then it is applied for the duration.
        timed: whether to time interleaved pairs of steps, for about `max_seconds`.

    Raises:
        UsageError: if the model is on `meta`: there is nothing to run. StepOutOfMemory: if the planned step, or a plain
            one to compare with, does not fit; says how much is needed.
    """
    if any(p.device.type == "meta" for p in model.parameters()):
        raise UsageError(
            f"{type(model).__name__} is on `meta`; a measured step needs real weights. Build it on the device, or "
            "stop at `plan`."
        )
    with untouched(model, batch, objective.functions), _in_place(model, plan):
        verification: _Verification | None = None
        try:
            verification = _Verification(StepBench(model, batch, objective, optimizer), plan)
            return verification.run(max_seconds if timed else None)
        except Exception as error:
            if isinstance(error, RecoupError) or not is_allocation_failure(error):
                raise
            needed = plan.predicted.peak_bytes + storage_bytes(p for p in model.parameters() if p.requires_grad)
            device = next(model.parameters()).device
            held = verification.bench.held_bytes() if verification is not None else storage_bytes(model.parameters())
            raise StepOutOfMemory(
                f"Verifying {type(model).__name__} ran out of memory. It needs the planned peak, "
                f"{format_bytes(plan.predicted.peak_bytes)}, and a copy of the gradients: {format_bytes(needed)}. "
                f"{format_bytes(available_bytes(device) + held)} are there for it on {device} (weights included). Use "
                "a smaller budget or batch, or `plan` and `apply` without evidence."
            ) from error
        finally:
            if verification is not None:
                verification.bench.restore()


@contextlib.contextmanager
def _in_place(model: nn.Module, plan: Plan) -> Iterator[None]:
    if find_patches(model) or not plan.decisions:
        yield
        return
    with apply_decisions(model, plan.decisions):
        yield


class _Verification:
    """The steps that prove one plan, in the order that needs the least memory."""

    def __init__(self, bench: StepBench, plan: Plan) -> None:
        self.bench = bench
        self._plan = plan
        self._tiles = not all(d.is_exact for d in plan.decisions)
        self._notes: list[str] = []
        is_cpu = bench.device.type == "cpu"
        self._aside = make_transport(bench.device, "disk" if is_cpu else "inline")
        room = available_bytes(bench.device) + bench.held_bytes()
        self._moves_plain = False
        self._plain_fits = plan.predicted.plain_peak_bytes + bench.trainable_bytes <= room
        self._peaks: dict[bool, int] = {}  # of the plain step (False) and the planned one (True)
        self._moved = 0

    def run(self, max_seconds: float | None) -> Evidence:
        """Returns the evidence; times steps for about `max_seconds`, None: not at all."""
        bench, plan = self.bench, self._plan
        audit = self._audit()
        if bench.optimizer is not None and self._plain_fits:  # its step counts, and is no part of what is compared
            with bench.optimizing(), plain(bench.model):
                bench.restore()
                self._plain_fits = self._attempt(lambda: self._metered(bench.step, planned=False)) is not None
        comparison, counters = self._compare(audit)
        ratio = spread = None
        with bench.optimizing():
            if True not in self._peaks:
                bench.restore()
                self._metered(bench.step, planned=True)
            if max_seconds is not None and False in self._peaks:
                ratio, spread = self._time(max_seconds)
        return Evidence(
            peak_bytes=self._peaks[True],
            baseline_peak_bytes=self._peaks.get(False),
            predicted_peak_bytes=plan.predicted.peak_bytes,
            budget_bytes=plan.budget_bytes,
            gradients_equal=comparison.gradients_equal,
            max_gradient_error=comparison.max_gradient_error,
            loss_equal=comparison.loss_equal,
            buffers_equal=comparison.buffers_equal,
            rng_equal=comparison.rng_equal,
            same_gradient_set=comparison.same_gradient_set,
            time_ratio=ratio,
            time_spread=spread,
            num_regions_replayed=counters[0],
            num_rederived=counters[1],
            differences=(*([str(audit.first)] if audit.first is not None else []), *comparison.differences),
            meter=meter_name(bench.device),
            notes=tuple(self._notes),
            replays_equal=not audit.divergences,
            num_replays_compared=audit.num_compared,
            error_bound=comparison.error_bound,
            loss_error=comparison.loss_error,
            offloaded_bytes=self._moved,
            predicted_offloaded_bytes=plan.predicted.offloaded_bytes,
            num_scan_evaluations=counters[2],
            predicted_scan_evaluations=plan.predicted.num_scan_evaluations,
            regions_diverged=tuple(dict.fromkeys(d.region for d in audit.divergences)),
            plain_repeats=comparison.plain_repeats,
        )

    def _attempt(self, run: Callable[[], _Result]) -> _Result | None:
        """Returns what `run` does, None if there is no memory for it; nothing of it is left then."""
        try:
            return run()
        except Exception as error:
            if not is_allocation_failure(error):
                raise
        self.bench.restore()
        gc.collect()
        if self.bench.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _metered(self, run: Callable[[], Any], *, planned: bool) -> int:
        """Runs (a part of) a step in the state it begins with; returns the peak, and notes it."""
        moved, held_bytes = _moved_bytes(self.bench.model), self.bench.held_bytes()
        peak = self._peaks[planned] = measure_peak(run, device=self.bench.device, held_bytes=held_bytes)
        if planned:
            self._moved = _moved_bytes(self.bench.model) - moved
        return peak

    def _audit(self) -> Audit:
        """Returns what one planned step with all that regions drop kept beside it found."""

        def run(aside: Transport | None) -> Audit:
            self.bench.restore()
            audit = Audit(self.bench.model, aside)
            with audit.running():
                self.bench.step(take=True)
            return audit

        in_memory = self._plain_fits and self.bench.device.type == "cpu"
        found = self._attempt(lambda: run(None)) if in_memory else None
        return run(self._aside) if found is None else found

    def _compare(self, audit: Audit) -> tuple[Comparison, tuple[int, int, int]]:
        """Compares one plain and one planned step; returns also what the planned one ran twice."""
        whole = self.bench.batch
        plain_result = self._plain_result()
        noise = 0.0
        if self._tiles:
            noise = rounding_noise(plain_result, self._result(planned=False, times=NOISE_FACTOR))
        before = (*execution_context.counters(), scan_bytes.num_evaluations())
        planned_result = self._result(planned=True)
        after = (*execution_context.counters(), scan_bytes.num_evaluations())
        bound = rounding_bound(plain_result, audit.coarsest, noise) if self._tiles else 0.0
        comparison = compare(plain_result, planned_result, bound=bound)
        del planned_result
        if not comparison.holds:
            again = compare(plain_result, self._result(planned=False), bound=1.0)
            if not again.is_exact:
                self._notes.append(
                    f"plain steps differ from each other by {again.max_gradient_error:.1e} (relative): kernels without "
                    "a fixed order of summation, or randomness that cannot be set; under "
                    "torch.use_deterministic_algorithms(True) more can be proved"
                )
                bound = rounding_bound(plain_result, audit.coarsest, again.max_gradient_error)
                comparison = dataclasses.replace(comparison, plain_repeats=False, error_bound=bound)
        self.bench.batch = whole
        return comparison, (after[0] - before[0], after[1] - before[1], after[2] - before[2])

    def _plain_result(self) -> StepResult:
        """Returns a plain step's result, its gradients in host memory: on a part of the batch where no more fits."""
        bench = self.bench
        if self._plain_fits:
            found = self._attempt(lambda: self._result(planned=False))
            if found is not None:
                return found
        self._moves_plain = True
        whole = num_rows(bench.batch)
        while True:
            found = self._attempt(lambda: self._result(planned=False))
            if found is not None:
                break
            smaller = first_half(bench.batch)
            if smaller is bench.batch:
                raise MemoryError("the plain step does not fit, even with what it saves moved away")
            bench.batch = smaller
        kept = "a temporary file" if bench.device.type == "cpu" else "host memory"
        note = f"the plain step does not fit: it was run with what it saves for backward in {kept}"
        if num_rows(bench.batch) != whole:
            note += f", and values were compared on {num_rows(bench.batch)} of {whole} examples"
        self._notes.append(note)
        return found

    def _result(self, *, planned: bool, times: float | None = None) -> StepResult:
        bench = self.bench
        bench.restore()
        aside = self._aside if self._moves_plain and not planned else None
        with contextlib.nullcontext() if planned else plain(bench.model):
            if bench.optimizer is None and times is None and not self._moves_plain:
                result = bench.step(take=True, meter=functools.partial(self._metered, planned=planned))
            else:
                result = bench.step(take=True, times=times, aside=aside)
        assert result is not None
        return result if planned or times is not None else on_host(result)

    def _time(self, max_seconds: float) -> tuple[float, float]:
        bench = self.bench

        def runner(planned: bool) -> Callable[[], None]:
            def run() -> None:
                with contextlib.nullcontext() if planned else plain(bench.model):
                    bench.step()

            return run

        seconds: dict[str, Any] = {"max_seconds": max_seconds, "before": bench.restore}
        return time_ratio(runner(False), runner(True), device=bench.device, **seconds)


def _moved_bytes(model: nn.Module) -> int:
    """Returns the bytes that the plan in place has moved to the host so far."""
    states = {id(patch.settings.state): patch.settings.state for patch in find_patches(model)}
    return sum(s.offloading.moves.bytes_out for s in states.values() if s.offloading is not None)
