"""`scan`: backpropagation through time, exact, in the memory of a few steps."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from recoup import _torch
from recoup.errors import InfeasibleBudget, ReplayError, UsageError
from recoup.recurrent.choose import StepBytes, cost_of, schedule_in_bytes
from recoup.recurrent.dead_state import StillRead, refusing
from recoup.recurrent.leaves import checked, flatten, is_differentiable, rebuild
from recoup.recurrent.loop import Loop
from recoup.recurrent.meter import StepMeter
from recoup.recurrent.outputs import MODES, Mode, Outputs
from recoup.recurrent.schedules.actions import Schedule
from recoup.recurrent.schedules.chunks import chunk_schedule, default_chunk
from recoup.recurrent.schedules.treeverse import treeverse_schedule
from recoup.recurrent.schedules.weighted import weighted_treeverse
from recoup.runtime import execution_context, scan_bytes
from recoup.runtime.rebuild.lineage import current_recorder
from recoup.runtime.step_log import Counts
from recoup.thresholds import ESTIMATE_SHARE, SAME_SHARE, SMALL_BYTES
from recoup.units import check_budget, is_minimum, parse_budget

_TAPES_IN_PROBE = 6  # two, and what running a step needs besides, by experience

Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(slots=True, kw_only=True)
class ScanReport:
    """Filled in by `scan(..., report=report)`.

    Attributes:
        schedule: name of the schedule that is followed.
        predicted_evaluations: step evaluations of the schedule, forward and backward together.
        evaluations: step evaluations so far; equal to the predicted ones once backward has run.
        step_bytes: sizes of one step; None unless a budget was given.
    """

    schedule: str = ""
    predicted_evaluations: int = 0
    evaluations: int = 0
    step_bytes: StepBytes | None = None


def scan(
    step: Step,
    inputs: Any,
    state: Any,
    *,
    budget: str | int | None = None,
    slots: int | None = None,
    chunk: int | None = None,
    outputs: Mode = "stack",
    length: int | None = None,
    rederive: bool | None = None,
    captured: Iterable[torch.Tensor] = (),
    costs: Sequence[float] | None = None,
    report: ScanReport | None = None,
) -> tuple[Any, Any]:
    """Runs `state, y = step(state, x)` over time and returns the last state and the outputs, differentiably.

    Only a few steps keep their autograd graph; the others are recomputed in backward. Where kernels are deterministic,
    gradients, outputs and the last state equal those of the plain loop bit for bit. Parameters that the step closes
    over get their gradients. Attributes that modules change in a step (a membrane potential, BatchNorm's statistics)
    are treated as part of the state; they end as after the plain loop. Random numbers are drawn as in the plain loop.

    Args:
        step: called with the state and the inputs of one time step; may close over modules and tensors.
        inputs: a pytree of tensors whose first dimension is time, or None with `length`. Steps get slices of them.
        state: a pytree of tensors (and None, numbers); may be None where modules keep the state themselves.
        budget: bytes the loop may take at its peak besides its results (outputs, last state, and the gradients it
            returns): held states, taped steps, and the work of a step. `"200MiB"`, or `"5%"` of all steps taped.
            The schedule with the fewest evaluations is computed (Gruslys et al. 2016).
        slots: how many states may be held, including the first; one step is taped at a time (treeverse).
        chunk: how many consecutive steps are taped together. Give at most one of `budget`, `slots` and `chunk`; the
            default is chunks of sqrt(T) steps.
        outputs: "stack" over time; "sum", "mean" or "last", which hold one output at a time; or "none".
        length: the number of steps, where `inputs` is None.
        rederive: whether taped steps run under `recoup.rederive()`; None: only if the scan is called under it.
        captured: tensors with gradients that the step reads from somewhere other than modules, closures, defaults,
            globals and attributes, where they are found without being named.
        costs: relative cost of evaluating each step, in any unit; with `slots` or `budget`, the schedule with the
            least total cost is followed. All equal if left out.
        report: a `ScanReport` to fill in.

    Returns:
        `(state, outputs)`, pytrees of the structure that `step` returns. Without grad mode, and in `torch.func`
        transforms, the plain loop runs.

    Raises:
        UsageError: if the arguments do not describe a loop.
        InfeasibleBudget: if one step does not fit the budget.
        ReplayError: from backward, if a recomputed step differs from its first evaluation, or a tensor that it reads
            was changed in place since.

    Example:
        >>> cell = torch.nn.GRUCell(4, 8)
        >>> def step(state, x):
        ...     state = cell(x, state)
        ...     return state, state
        >>> last, states = recoup.recurrent.scan(step, torch.randn(16, 2, 4), torch.zeros(2, 8), slots=3)
        >>> states.shape
        torch.Size([16, 2, 8])
        >>> states.sum().backward()
    """
    num_steps = _check(inputs, length, budget, slots, chunk, outputs)
    weights = _checked_costs(costs, num_steps)
    if report is not None:
        report.evaluations = report.predicted_evaluations = num_steps
        report.schedule = "plain"
    if not torch.is_grad_enabled() or _torch.inside_transform() or torch.compiler.is_compiling():
        return _plain(step, inputs, state, num_steps, outputs)
    planned = scan_bytes.ask(is_free=budget is None and slots is None and chunk is None)
    budget = budget if planned is None else planned
    recorder = current_recorder()
    derives = rederive if rederive is not None else recorder is not None and recorder.deriving
    autocast = _Autocast()
    counts = execution_context.current_counts()
    extra = list(captured)

    def begun(*, holds_unread: bool) -> Loop:
        loop = Loop(
            step,
            inputs,
            state,
            num_steps=num_steps,
            outputs=Outputs(outputs, num_steps),
            derives=derives,
            extra=extra,
            holds_unread=holds_unread,
        )
        try:
            meter = StepMeter() if budget is not None else None
            loop.is_lean = slots is None
            loop.probe(meter, keeps=lambda tape_bytes: _keeps_tapes(budget, num_steps, tape_bytes))
            schedule = _choose(loop, budget, slots, chunk, meter, report, weights, is_planned=planned is not None)
            if report is not None:
                report.schedule, report.predicted_evaluations = schedule.name, loop.evaluations_of(schedule)
            loop.forward(schedule)
        except StillRead:
            loop.rewind()
            raise
        except BaseException:
            loop.abandon()
            raise
        return loop

    with autocast.entered(), _paused(recorder), refusing(), scan_bytes.inside(is_first=True):
        try:
            loop = begun(holds_unread=False)
        except StillRead:  # what the first steps left unread, a later one reads: nothing is left out then
            loop = begun(holds_unread=True)
    if planned is not None:
        scan_bytes.count_evaluations(loop.evaluations, counts)
    if report is not None:
        report.evaluations = loop.evaluations
    start = [t for t in loop.start if t.requires_grad]
    needed = [*start, *(x for x in loop.inputs if x.requires_grad), *loop.captured.tensors]
    results = [t.detach() for t in loop.outputs.results]
    if not needed:
        return loop.finish(None), loop.outputs.nest(results)
    run = _Run(loop, autocast, report, results, planned is not None, counts)
    found = list(_Scan.apply(run, *needed))  # type: ignore[no-untyped-call]
    run.results = []
    return loop.finish(found[len(results) :]), loop.outputs.nest(found[: len(results)])


@dataclasses.dataclass(slots=True)
class _Run:
    """What the autograd node of a scan holds."""

    loop: Loop
    autocast: _Autocast
    report: ScanReport | None
    results: list[torch.Tensor]
    is_planned: bool
    counts: tuple[Counts, ...]


class _Scan(torch.autograd.Function):
    """The loop as one node; its forward has happened already."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *needed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        ctx.save_for_backward(*needed)  # held by the closure anyway; tells of changes in place
        ctx.set_materialize_grads(False)
        loop = run.loop
        found = [*run.results, *(t.detach() for t in loop.last)]
        flags = [*(loop.output_flags if run.results else []), *loop.last_flags]
        ctx.mark_non_differentiable(
            *(t for t, flag in zip(found, flags, strict=True) if not flag or not is_differentiable(t))
        )
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                "recoup.recurrent.scan: double backward (create_graph=True) through a scan is not supported; the "
                "steps' graphs are gone after the first. Use the plain loop where second derivatives are needed."
            )
        _ = ctx.saved_tensors  # raises if one was changed in place
        run: _Run = ctx.run
        loop = run.loop
        num_results = len(loop.output_flags) if loop.outputs.mode != "none" else 0
        before = loop.evaluations
        with run.autocast.entered(), _paused(current_recorder()), refusing(), scan_bytes.inside():
            try:
                starts, inputs, captured = loop.backward(list(gradients[:num_results]), list(gradients[num_results:]))
            except StillRead:
                raise ReplayError(
                    "recoup.recurrent.scan: a step, run a second time, reads an attribute that it had not read the "
                    "first time. It depends on something that changed since; keep that fixed or hand it through the "
                    "state.",
                    code="E205",
                ) from None
        if run.is_planned:
            scan_bytes.count_evaluations(loop.evaluations - before, run.counts)
        if run.report is not None:
            run.report.evaluations = loop.evaluations
        of_start = [g for g, t in zip(starts, loop.start, strict=True) if t.requires_grad]
        of_inputs = [g for g, x in zip(inputs, loop.inputs, strict=True) if x.requires_grad]
        return (None, *of_start, *of_inputs, *captured)


class _Autocast:
    """Autocast as it is now, without its cache: a weight cast without a graph must not serve a taped step."""

    def __init__(self) -> None:
        self._on = [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        ]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, dtype in self._on:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
            yield


@contextlib.contextmanager
def _paused(recorder: Any) -> Iterator[None]:
    if recorder is None:
        yield
        return
    recorder.paused += 1
    try:
        yield
    finally:
        recorder.paused -= 1


def _keeps_tapes(budget: str | int | None, num_steps: int, tape_bytes: int) -> bool:
    """Whether the tapes of the first steps fit the budget while another step is measured."""
    assert budget is not None
    return _TAPES_IN_PROBE * tape_bytes <= parse_budget(budget, plain_peak_bytes=num_steps * tape_bytes)


def _choose(
    loop: Loop,
    budget: str | int | None,
    slots: int | None,
    chunk: int | None,
    meter: StepMeter | None,
    report: ScanReport | None,
    costs: tuple[float, ...] | None,
    *,
    is_planned: bool,
) -> Schedule:
    num_steps = loop.num_steps
    if meter is not None and budget is not None:
        working_bytes = meter.working_bytes()
        step_bytes = StepBytes(
            state=meter.state_bytes, tape=meter.tape_bytes, in_row=meter.in_row_bytes, working=working_bytes
        )
        budget_bytes = parse_budget(budget, plain_peak_bytes=step_bytes.taped(num_steps))
        shared_bytes = loop.shared_tape_bytes()
        if is_planned:  # the batch is larger than the plan's: run in the least memory possible instead of failing
            budget = budget_bytes = max(budget_bytes, working_bytes + meter.tape_bytes)
            scan_bytes.measured(
                scan_bytes.StepOfScan(
                    num_steps=num_steps,
                    state_bytes=meter.state_bytes,
                    tape_bytes=meter.tape_bytes,
                    in_row_bytes=meter.in_row_bytes,
                    working_bytes=working_bytes,
                    shared_bytes=shared_bytes,
                )
            )
        sharing = dataclasses.replace(step_bytes, working=working_bytes + shared_bytes)
        with contextlib.suppress(InfeasibleBudget):
            schedule = schedule_in_bytes(num_steps, budget, sharing, costs)
            alone = schedule_in_bytes(num_steps, budget, step_bytes, costs) if shared_bytes else schedule
            # A graph of its own costs a step about 0.1 ms, more than a small step itself.
            may_cost = ESTIMATE_SHARE if meter.tape_bytes <= SMALL_BYTES else SAME_SHARE
            if cost_of(schedule, costs) <= (1 + may_cost) * cost_of(alone, costs):
                if report is not None:
                    report.step_bytes = sharing
                return schedule
        loop.max_taped = 1
        if report is not None:
            report.step_bytes = step_bytes
        return schedule_in_bytes(num_steps, budget, step_bytes, costs)
    if slots is not None:
        return treeverse_schedule(num_steps, slots) if costs is None else weighted_treeverse(costs, slots)
    return chunk_schedule(num_steps, min(num_steps, chunk or default_chunk(num_steps)))


def _plain(step: Step, inputs: Any, state: Any, num_steps: int, mode: Mode) -> tuple[Any, Any]:
    tensors, template = flatten(inputs)
    collected = Outputs(mode, num_steps)
    grad = torch.is_grad_enabled()
    kept: list[list[torch.Tensor]] = []
    last: Any = None
    for t in range(num_steps):
        state, y = checked(step(state, rebuild(template, [x[t] for x in tensors])))
        if not grad:
            collected.collect(y)
        elif mode != "none":
            found, last = flatten(y)
            kept = kept if mode != "last" else []
            kept.append(found)
    if not grad:
        collected.finish()
        return state, collected.nest(collected.results)
    if mode == "none":
        return state, None
    columns = [list(column) for column in zip(*kept, strict=True)]
    if mode == "stack":
        return state, rebuild(last, [torch.stack(column) for column in columns])
    totals = []
    for column in columns:
        total = column[0]
        for tensor in column[1:]:
            total = total + tensor
        totals.append(total / num_steps if mode == "mean" else total)
    return state, rebuild(last, totals)


def _check(
    inputs: Any, length: int | None, budget: str | int | None, slots: int | None, chunk: int | None, outputs: str
) -> int:
    """Returns the number of steps; raises UsageError if the arguments do not describe a loop."""
    given = [name for name, value in (("budget", budget), ("slots", slots), ("chunk", chunk)) if value is not None]
    if len(given) > 1:
        raise UsageError(f"recoup.recurrent.scan: {' and '.join(given)} were given; give one of them.")
    for name, value in (("slots", slots), ("chunk", chunk), ("length", length)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UsageError(f"recoup.recurrent.scan: {name} must be a whole number from 1 up; got {value!r}.")
    if budget is not None:
        check_budget(budget)
        if budget == "auto" or is_minimum(budget):
            raise UsageError(
                f"recoup.recurrent.scan: budget={budget!r} is not for a loop. Give bytes, or '5%' of its tape."
            )
    if outputs not in MODES:
        raise UsageError(f"recoup.recurrent.scan: outputs must be one of {', '.join(MODES)}; got {outputs!r}.")
    tensors = flatten(inputs)[0]
    sizes = {t.shape[0] if t.dim() else 0 for t in tensors}
    if not tensors and length is None:
        raise UsageError("recoup.recurrent.scan: inputs hold no tensor; give the number of steps as `length`.")
    if len(sizes) > 1 or (length is not None and sizes - {length}) or sizes == {0}:
        raise UsageError(
            f"recoup.recurrent.scan: the first dimension of all inputs is time and must be equal and at least 1; found "
            f"{sorted(sizes)}{'' if length is None else f' with length={length}'}."
        )
    return length if length is not None else next(iter(sizes))


def _checked_costs(costs: Sequence[float] | None, num_steps: int) -> tuple[float, ...] | None:
    if costs is None:
        return None
    try:
        found = tuple(float(cost) for cost in costs)
    except (TypeError, ValueError):
        found = ()
    if len(found) != num_steps or not all(0 < cost < math.inf for cost in found):
        raise UsageError(
            f"recoup.recurrent.scan: costs must be one positive number for each of the {num_steps} steps; got "
            f"{costs!r:.80}."
        )
    return None if len(set(found)) == 1 else found
