"""Runs the plain and the planned step from the same state and compares everything.

Both start from the same weights, buffers, attributes and random streams. One planned step keeps what regions drop and
compares every replay with it (`replay_audit.py`); one plain and one planned step are run under the meter and compared
value by value (with an optimizer, whose step counts too, they are metered apart); time is taken of plain and
planned steps in turn. The model's whole state is put back.

[Note: memory of a verification] A plan is proved where the plain step does not fit:
1. What has to be kept for a comparison is one copy of the gradients. It is gone before an optimizer steps, and a copy
   of the weights that optimizers change takes its place. Both are in host memory for a model on a GPU.
2. A plain step that cannot fit runs with what it saves for backward moved to host memory or, on a CPU, to a temporary
   file: the same kernels on the same bytes. So do the audit's originals. It is not metered or timed then.
3. Where even that fails, the values, and replays with what they stand for, are compared on half the batch, and on
   half of that.
4. Host memory is asked for before it is taken (`HostRoom`): a process that takes more than there is is killed. Without
   room for the copies of rule 1 nothing is run; without room for those of rule 2, rule 3 holds.

[Note: kernels without a fixed order of summation] A plan has the plain step run the same kernels on the same bits; that
is all that it can promise. On a GPU the backward of flash and cuDNN attention, of embeddings and of scatters adds with
atomics: the plain step's own bits change from run to run. So where a planned step differs, plain is compared with plain
first; if they differ too, everything is compared again under `torch.use_deterministic_algorithms(True)`, where equal
bits prove the plan and others are its fault.
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

from recoup import progress
from recoup._allocation import (
    HostMemoryError,
    HostRoom,
    available_bytes,
    host_memory_error,
    is_allocation_failure,
)
from recoup._pytree import first_half, iterate_tensors, num_rows
from recoup.capture.optimizer import OptimizerLike, check_optimizer
from recoup.capture.snapshot import Snapshot, untouched
from recoup.capture.step import Objective
from recoup.errors import RecoupError, StepError, StepOutOfMemory, UsageError, first_line
from recoup.evidence.deterministic import deterministic_kernels, is_without_deterministic_kernel
from recoup.evidence.gradients import (
    Comparison,
    StepResult,
    compare,
    not_finite,
    on_host,
    rounding_bound,
    rounding_noise,
)
from recoup.evidence.memory import measure_peak, meter_name, storage_bytes
from recoup.evidence.noise import NOISE_FACTOR
from recoup.evidence.replay_audit import Audit
from recoup.evidence.speed import time_ratio
from recoup.evidence.step_bench import StepBench
from recoup.ir.evidence import Evidence
from recoup.ir.plan import Plan
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions, find_patches, plain
from recoup.runtime.conflicts import refuse_unready
from recoup.runtime.offload.transport import Transport, make_transport
from recoup.runtime.step_log import StepLog
from recoup.units import format_bytes

_Result = TypeVar("_Result")


def verify_plan(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    *,
    objective: Objective = Objective(),
    optimizer: OptimizerLike | None = None,
    timed: bool = True,
    max_seconds: float = 30.0,
) -> Evidence:
    """Returns the evidence for `plan` on `model`.

    Args:
        plan: applied already, or not: then it is applied for the duration.
        timed: whether to time plain and planned steps in turn, for about `max_seconds`.

    Raises:
        UsageError: if the model is on `meta`: there is nothing to run; or if the host lacks memory.
        StepError: if a step fails.
        StepOutOfMemory: if the planned step, or a plain one to compare with, does not fit; says how much is needed.
    """
    check_optimizer(optimizer)
    refuse_unready(model, batch)
    if any(p.device.type == "meta" for p in model.parameters()):
        raise UsageError(
            f"{type(model).__name__} is on `meta`; a measured step needs real weights. Build it on the device, or "
            "stop at `plan`."
        )
    with untouched(model, batch, objective.functions) as before, _in_place(model, plan):
        verification: _Verification | None = None
        device = next(model.parameters()).device
        room_bytes = available_bytes(device) + storage_bytes(model.parameters())
        try:
            if device.type != "cpu":
                trainable_bytes = storage_bytes(p for p in model.parameters() if p.requires_grad)
                HostRoom().check(trainable_bytes, "a copy of the gradients, and of the weights after it,")
            if plan.predicted.is_later_step:
                _run_first(model, batch, objective, before)
            verification = _Verification(StepBench(model, batch, objective, optimizer), plan)
            return verification.run(max_seconds if timed else None)
        except Exception as error:
            if isinstance(error, RecoupError):
                raise
            if not is_allocation_failure(error):  # the user's model and loss may raise anything
                raise StepError(
                    f"A step of {type(model).__name__} failed while the plan was verified: {type(error).__name__}: "
                    f"{first_line(error).rstrip('.')}. Is it the batch and the step (step=, loss=, inputs=, targets=) "
                    "that the plan was made for? The error that this one was raised from says where."
                ) from error
            if (lacking := host_memory_error(error)) is not None:
                raise UsageError(
                    f"{type(model).__name__} on {device} cannot be verified on this host: {lacking}. Free some, use a "
                    "smaller batch, or `plan` and `apply` without evidence."
                ) from error
            needed = plan.predicted.peak_bytes + storage_bytes(p for p in model.parameters() if p.requires_grad)
            raise StepOutOfMemory(
                f"Verifying {type(model).__name__} ran out of memory. It needs the planned peak, "
                f"{format_bytes(plan.predicted.peak_bytes)}, and a copy of the gradients: {format_bytes(needed)}. "
                f"{format_bytes(room_bytes)} were there for it on {device} (weights included). Use a smaller budget "
                "or batch, or `plan` and `apply` without evidence."
            ) from error
        finally:
            if verification is not None:
                verification.bench.restore()


@execution_context.unwatched()
def _run_first(model: nn.Module, batch: Any, objective: Objective, before: Snapshot) -> None:
    """Runs a plain forward, so that what the steps before the planned one leave in the model is there."""
    with plain(model), torch.no_grad(), before.watching(), contextlib.suppress(Exception):  # as the capture does
        objective.run(model, batch)
    before.renew_iterators()


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
        self._is_metered = True
        self._plain_fits = plan.predicted.plain_peak_bytes + bench.trainable_bytes <= room
        self._peaks: dict[bool, int] = {}  # of the plain step (False) and the planned one (True)
        self._moved = 0
        self._room = HostRoom()
        self._refusal: HostMemoryError | None = None  # of the last attempt

    def run(self, max_seconds: float | None) -> Evidence:
        """Returns the evidence; times steps for about `max_seconds`, None: not at all."""
        bench, plan = self.bench, self._plan
        progress.advance("step 1 of 3: every replay beside what it stands for")
        audit = self._audit()
        if bench.optimizer is not None and self._plain_fits:  # its step counts, and is no part of what is compared
            with bench.optimizing(), plain(bench.model):
                bench.restore()
                self._plain_fits = self._attempt(lambda: self._metered(bench.step, planned=False)) is not None
        progress.advance("steps 2 and 3 of 3: plain and planned, compared and metered")
        comparison, audit, ran = self._compare(audit)
        ratio = spread = None
        with bench.optimizing():
            if True not in self._peaks:
                bench.restore()
                self._metered(bench.step, planned=True)
            if max_seconds is not None and False in self._peaks:
                progress.advance("timing plain and planned steps in turn, at most six")
                ratio, spread = self._time(max_seconds)
        given, planned = storage_bytes(iterate_tensors(bench.batch)), plan.predicted.batch_bytes
        if planned and given != planned and self._peaks[True] > plan.budget_bytes:
            self._notes.append(
                f"the plan was made for a batch of {format_bytes(planned)}, and this one has {format_bytes(given)}: "
                "plan for it, or verify with the other"
            )
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
            num_regions_replayed=ran.num_replays,
            num_rederived=ran.num_rederived,
            differences=(*([str(audit.first)] if audit.first is not None else []), *comparison.differences),
            meter=meter_name(bench.device),
            notes=tuple(dict.fromkeys(self._notes)),
            replays_equal=not audit.divergences,
            num_replays_compared=audit.num_compared,
            error_bound=comparison.error_bound,
            loss_error=comparison.loss_error,
            offloaded_bytes=self._moved,
            predicted_offloaded_bytes=plan.predicted.offloaded_bytes,
            num_scan_evaluations=ran.num_scan_evaluations,
            predicted_scan_evaluations=plan.predicted.num_scan_evaluations,
            regions_diverged=tuple(dict.fromkeys(d.region for d in audit.divergences)),
            plain_repeats=comparison.plain_repeats,
        )

    def _attempt(self, run: Callable[[], _Result]) -> _Result | None:
        """Returns the result of `run`; None if memory ran out, after everything of it was freed."""
        try:
            return run()
        except Exception as error:
            if not is_allocation_failure(error):
                raise
            lacking = host_memory_error(error)
            self._refusal = None if lacking is None else HostMemoryError(*lacking.args)  # its traceback holds the step
        gc.collect()
        self.bench.restore()
        return None

    def _metered(self, run: Callable[[], Any], *, planned: bool) -> int:
        """Runs a step, or a part of one, from the initial state; returns its peak in bytes and records it."""
        moved, held_bytes = _moved_bytes(self.bench.model), self.bench.held_bytes()
        peak = self._peaks[planned] = measure_peak(run, device=self.bench.device, held_bytes=held_bytes)
        if planned:
            self._moved = _moved_bytes(self.bench.model) - moved
        return peak

    def _audit(self) -> Audit:
        """Runs one planned step that keeps what regions drop; returns the comparison with their replays."""

        def run(aside: Transport | None) -> Audit:
            self.bench.restore()
            audit = Audit(self.bench.model, aside)
            with audit.running():
                self.bench.step(take=True)
            return audit

        in_memory = self._plain_fits and self.bench.device.type == "cpu"
        found = self._attempt(lambda: run(None)) if in_memory else None
        whole = self.bench.batch
        try:
            return self._on_what_fits(lambda: run(self._aside)) if found is None else found
        finally:
            self.bench.batch = whole

    def _on_what_fits(self, run: Callable[[], _Result]) -> _Result:
        """Returns the result of `run` on the largest part of the batch that fits; later steps use that part too."""
        bench, whole = self.bench, num_rows(self.bench.batch)
        while (found := self._attempt(run)) is None:
            smaller = first_half(bench.batch)
            if smaller is bench.batch:
                raise MemoryError("not even one example fits, with what is compared moved away") from self._refusal
            bench.batch = smaller
        if num_rows(bench.batch) != whole:
            self._notes.append(f"values were compared on {num_rows(bench.batch)} of {whole} examples: no more fits")
        return found

    def _compare(self, audit: Audit) -> tuple[Comparison, Audit, StepLog]:
        """Compares a plain and a planned step; where plain steps differ, with deterministic kernels if there are any.

        Returns:
            The comparison, the replays that belong to it, and the planned step's log.
        """
        comparison, ran = self._compare_once(audit)
        if comparison.plain_repeats:
            return comparison, audit, ran
        self._is_metered = False  # other kernels, with other workspaces
        differs = "plain steps differ from each other: kernels without a fixed order of summation"
        how = "torch.use_deterministic_algorithms(True)"
        try:
            with deterministic_kernels():
                audit = self._audit()
                comparison, ran = self._compare_once(audit)
            self._notes.append(
                f"{differs}; what is said of values holds under {how}, where they do not"
                if comparison.plain_repeats
                else f"{differs}, or randomness that cannot be set, as they also do under {how}"
            )
        except Exception as error:
            if not is_allocation_failure(error) and not is_without_deterministic_kernel(error):
                raise
            self._notes.append(f"{differs}; under {how} the step does not run: {str(error).splitlines()[0]}")
        finally:
            self._is_metered = True
        return comparison, audit, ran

    def _compare_once(self, audit: Audit) -> tuple[Comparison, StepLog]:
        """Compares one plain and one planned step; also returns the planned step's log."""
        whole = self.bench.batch
        plain_result = self._plain_result()
        if note := not_finite(plain_result):
            self._notes.append(note)
        noise = 0.0
        if self._tiles:
            # One draw of how far two roundings lie apart, as the plan's error is another: half of the time the larger.
            noise = 2 * rounding_noise(plain_result, self._result(planned=False, times=NOISE_FACTOR))
        before = execution_context.thread_log()
        planned_result = self._result(planned=True)
        ran = execution_context.thread_log() - before
        bound = rounding_bound(plain_result, audit.coarsest, noise) if self._tiles else 0.0
        comparison = compare(plain_result, planned_result, bound=bound)
        del planned_result
        if not comparison.holds or audit.divergences:
            again = compare(plain_result, self._result(planned=False), bound=1.0)
            if not again.is_exact:
                bound = rounding_bound(plain_result, audit.coarsest, again.max_gradient_error)
                comparison = dataclasses.replace(comparison, plain_repeats=False, error_bound=bound)
        self.bench.batch = whole
        return comparison, ran

    def _plain_result(self) -> StepResult:
        """Returns a plain step's result, its gradients in host memory: on a part of the batch where no more fits."""
        bench = self.bench
        if self._plain_fits:
            found = self._attempt(lambda: self._result(planned=False))
            if found is not None:
                return found
        self._moves_plain = True
        kept = "a temporary file" if bench.device.type == "cpu" else "host memory"
        self._notes.append(f"the plain step does not fit: it was run with what it saves for backward in {kept}")
        return self._on_what_fits(lambda: self._result(planned=False))

    def _result(self, *, planned: bool, times: float | None = None) -> StepResult:
        bench = self.bench
        bench.restore()
        aside = self._aside if self._moves_plain and not planned else None
        with contextlib.nullcontext() if planned else plain(bench.model):
            if self._is_metered and bench.optimizer is None and times is None and not self._moves_plain:
                result = bench.step(take=True, meter=functools.partial(self._metered, planned=planned))
            else:
                result = bench.step(take=True, times=times, aside=aside)
        assert result is not None
        return result if planned or times is not None else on_host(result, self._room)

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
