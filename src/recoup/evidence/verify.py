"""Runs the plain and the planned step from the same state and compares everything.

Both start from the same weights, buffers, attributes and random streams. One more planned step keeps what regions drop
and compares every replay with it (`audit.py`). One planned step is run under the meter; time is taken over interleaved
pairs. Nothing of the model changes: weights, buffers, `.grad`s, flags and streams are put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from recoup._pytree import iterate_tensors, map_tensors
from recoup.capture.optimizer import OptimizerLike, rebuild_optimizer
from recoup.capture.snapshot import Snapshot, untouched
from recoup.capture.step import Loss, call_model, loss_of, placeholder_gradient, step_optimizer
from recoup.errors import UsageError
from recoup.evidence.gradients import NOISE_FACTOR, Comparison, StepResult, compare, rounding_noise, take_result
from recoup.evidence.memory import measure_peak, meter_name, storage_bytes
from recoup.evidence.replay_audit import Audit
from recoup.evidence.speed import time_ratio
from recoup.ir.evidence import Evidence
from recoup.ir.plan import Plan
from recoup.runtime import execution_context, scan_bytes
from recoup.runtime.apply import apply_decisions, find_patches, plain


class StepBench:
    """A model in a fixed state, on which steps are run and taken back."""

    def __init__(self, model: nn.Module, batch: Any, loss: Loss | None, optimizer: OptimizerLike | None) -> None:
        self.model = model
        self.batch = batch
        self.loss = loss
        self.device = next(model.parameters()).device
        self._before = Snapshot(model, weights=optimizer is not None)
        self.optimizer: torch.optim.Optimizer | None = None
        if optimizer is not None:
            parameters = [p for p in model.parameters() if isinstance(p, nn.Parameter)]
            self.optimizer = rebuild_optimizer(optimizer, {id(p): p for p in parameters}, parameters, foreach=False)
            for parameter in parameters:
                parameter.grad = placeholder_gradient(self.optimizer, parameter) if parameter.requires_grad else None
            step_optimizer(self.optimizer)
            self.restore()

    def restore(self) -> None:
        """Puts weights, buffers, attributes and random streams back; no parameter has a gradient then."""
        self._before.restore()
        for parameter in self.model.parameters():
            parameter.grad = None

    def held_bytes(self) -> int:
        """Returns the bytes that are there before a step: weights, buffers, optimizer state, batch."""
        state = [dict(s) for s in self.optimizer.state.values()] if self.optimizer is not None else []
        tensors = [*self.model.parameters(), *self.model.buffers(), *iterate_tensors([self.batch, state])]
        return storage_bytes(t for t in tensors if t.device.type == self.device.type)

    def step(self, *, take: bool = False, times: float | None = None) -> StepResult | None:
        """Runs one training step; with `take`, returns what it left behind (and runs no optimizer step).

        Args:
            times: the loss is multiplied by it before backward.
        """
        output = call_model(self.model, self.batch)
        loss, _ = loss_of(output, self.batch, self.loss)
        del output
        (loss if times is None else loss * times).backward()  # type: ignore[no-untyped-call]
        if take:
            return take_result(self.model, loss)
        del loss
        if self.optimizer is not None:
            step_optimizer(self.optimizer)
        return None


def verify_plan(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    timed: bool = True,
    max_seconds: float = 30.0,
) -> Evidence:
    """Returns the evidence for `plan` on `model`.

    Args:
        plan: applied already, or not: then it is applied for the duration.
        timed: whether to time interleaved pairs of steps, for about `max_seconds`.

    Raises:
        UsageError: if the model is on `meta`: there is nothing to run.
    """
    if any(p.device.type == "meta" for p in model.parameters()):
        raise UsageError(
            f"{type(model).__name__} is on `meta`; a measured step needs real weights. Build it on the device, or "
            "stop at `plan`."
        )
    notes: list[str] = []
    tiled = not all(d.is_exact for d in plan.decisions)
    with untouched(model), _in_place(model, plan):
        bench = StepBench(model, batch, loss, optimizer)
        try:
            comparison, baseline_peak, peak, counters, audit, moved_bytes = _measure(bench, notes, tiled)
            ratio: float | None = None
            spread: float | None = None
            if timed and baseline_peak is not None:
                ratio, spread = _time(bench, max_seconds)
        finally:
            bench.restore()
    return Evidence(
        peak_bytes=peak,
        baseline_peak_bytes=baseline_peak,
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
        notes=tuple(notes),
        replays_equal=not audit.divergences,
        num_replays_compared=audit.num_compared,
        error_bound=comparison.error_bound,
        loss_error=comparison.loss_error,
        offloaded_bytes=moved_bytes,
        predicted_offloaded_bytes=plan.predicted.offloaded_bytes,
        num_scan_evaluations=counters[2],
        predicted_scan_evaluations=plan.predicted.num_scan_evaluations,
    )


@contextlib.contextmanager
def _in_place(model: nn.Module, plan: Plan) -> Iterator[None]:
    if find_patches(model) or not plan.decisions:
        yield
        return
    with apply_decisions(model, plan.decisions):
        yield


def _measure(
    bench: StepBench, notes: list[str], tiled: bool
) -> tuple[Comparison, int | None, int, tuple[int, int, int], Audit, int]:
    """Runs one plain and one planned step under the meter, one of each for the values, and one to audit replays.

    Returns also the bytes that the metered planned step moved to the host.
    """
    held, device = bench.held_bytes(), bench.device

    def metered() -> int:
        bench.restore()
        return measure_peak(bench.step, device=device, held_bytes=held)

    baseline: int | None = None
    whole = bench.batch
    try:
        with plain(bench.model):
            baseline = metered()
    except torch.OutOfMemoryError:
        bench.restore()
        bench.batch = _half(bench.batch)
        notes.append("the plain step does not fit: gradients were compared on half the batch")
    plain_result = _result(bench, planned=False)
    noise = rounding_noise(plain_result, _result(bench, planned=False, times=NOISE_FACTOR)) if tiled else 0.0
    before = (*execution_context.counters(), scan_bytes.num_evaluations())
    planned_result = _result(bench, planned=True)
    after = (*execution_context.counters(), scan_bytes.num_evaluations())
    comparison = compare(plain_result, planned_result, rounds_differently=tiled, noise=noise)
    del plain_result, planned_result
    bench.restore()
    audit = Audit(bench.model)
    with audit.running():
        bench.step(take=True)
    bench.batch = whole
    moved = _moved_bytes(bench.model)
    peak = metered()
    counters = (after[0] - before[0], after[1] - before[1], after[2] - before[2])
    return comparison, baseline, peak, counters, audit, _moved_bytes(bench.model) - moved


def _moved_bytes(model: nn.Module) -> int:
    """Returns the bytes that the plan in place has moved to the host so far."""
    states = {id(patch.settings.state): patch.settings.state for patch in find_patches(model)}
    return sum(s.offloading.moves.bytes_out for s in states.values() if s.offloading is not None)


def _result(bench: StepBench, *, planned: bool, times: float | None = None) -> StepResult:
    bench.restore()
    with contextlib.nullcontext() if planned else plain(bench.model):
        result = bench.step(take=True, times=times)
    assert result is not None
    return result


def _time(bench: StepBench, max_seconds: float) -> tuple[float, float]:
    def runner(planned: bool) -> Callable[[], None]:
        def run() -> None:
            with contextlib.nullcontext() if planned else plain(bench.model):
                bench.step()
            for parameter in bench.model.parameters():
                parameter.grad = None

        return run

    bench.restore()
    return time_ratio(runner(False), runner(True), device=bench.device, max_seconds=max_seconds)


def _half(batch: Any) -> Any:
    sizes = {t.shape[0] for t in iterate_tensors(batch) if t.dim() > 0}
    full = max(sizes, default=0)
    if full < 2:
        return batch
    return map_tensors(lambda t: t[: full // 2] if t.dim() > 0 and t.shape[0] == full else t, batch)
