"""Captures one training step as a `Trace`, without touching the model.

Two runs under fake tensors: the step as it is (forward, loss, backward, optimizer), and its forward again with nothing
saved by autograd, which shows when each storage would be freed if it were not saved. Where fake tensors cannot follow
the model (data-dependent shapes, `.item()` on an activation) the step is run for real, and the reason noted.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recoup import _torch, progress
from recoup._allocation import is_allocation_failure
from recoup._collector import without_collector
from recoup._pytree import iterate_tensors
from recoup.capture.categories import categories_of, note_gradients, step_optimizer
from recoup.capture.dialect import cuda_dialect, cuda_results
from recoup.capture.draws import draw_from
from recoup.capture.fakify import fake_batch, fake_like, fake_parameters, real_batch
from recoup.capture.fingerprint import fingerprint
from recoup.capture.folding import Counted, Folding, FoldingMemory, Irregular, unfold
from recoup.capture.island import Island
from recoup.capture.leaks import run_on_fakes
from recoup.capture.module_calls import CallRecorder
from recoup.capture.op_cache import FakeResults, KeptAnswers, answers_for
from recoup.capture.optimizer import OptimizerStep, ScalarsOfFakes, prepare_optimizer
from recoup.capture.snapshot import Snapshot, parameters_outside, untouched
from recoup.capture.spec import StepSpec
from recoup.capture.trace import build_trace, runs_alike
from recoup.capture.tracker import Tracker
from recoup.capture.watched_step import (
    Failed,
    FailedUnderPlan,
    Unfollowable,
    device_of,
    register,
    run_step,
    saving,
)
from recoup.errors import RealStepWarning, RecoupError, StepError
from recoup.ir.trace import Trace
from recoup.runtime import execution_context


def capture(spec: StepSpec, *, known: Trace | None = None) -> Trace:
    """Returns the trace of one step with what is applied to the model now (nothing, or a plan).

    Args:
        known: the plain step's trace. With it only forward, loss and backward are run: the optimizer's state is one
            block of known size, its step is left out, and `released_op` of storages is not determined.

    Raises:
        StepError: if the step itself fails.
    """
    if not any(True for _ in spec.model.parameters()):
        raise StepError(
            f"{type(spec.model).__name__} has no parameters; there is no training step to plan. Pass the nn.Module "
            "that holds the weights."
        )
    if known is not None and known.source == "real":
        reason = known.reason  # what fake tensors could not follow is the user's, and still there
    else:
        try:
            return _capture_fake(spec, known)
        except (Unfollowable, StepError) as error:
            # An op may run and have no fake kernel, or one that is pickier: the real step decides.
            reason = error.reason if isinstance(error, Failed) else str(error)
    if any(p.device.type == "meta" for p in spec.model.parameters()):
        raise StepError(
            f"The step of {type(spec.model).__name__} cannot be followed without data ({reason}), and the model has "
            "none (it is on `meta`). Build it on a real device, with fewer layers if it is too large. A mixture of "
            "experts that looks up which tokens go to an expert needs their values; transformers computes one without "
            "them in bfloat16, or in any dtype with experts_implementation='batched_mm': plan and train it so."
        )
    if device_of(spec.model).startswith("cuda"):
        warnings.warn(
            f"The step of {type(spec.model).__name__} cannot be followed without data ({reason}): a real one is run on "
            f"{device_of(spec.model)}, and takes the memory and the time of one. [E301]",
            RealStepWarning,
            stacklevel=2,
        )
    try:
        num_methods = len(spec.methods)
        trace = _capture_real(spec, reason)
        return trace if num_methods == len(spec.methods) else _capture_real(spec, reason)
    except Failed as error:
        if error.__cause__ is not None and is_allocation_failure(error.__cause__):
            raise StepError(
                f"The step cannot be followed without data ({reason}), and there is no memory for a real one on "
                f"{device_of(spec.model)}. Plan with a smaller batch, or branch on shapes and token ids alone."
            ) from error
        if known is not None:
            raise FailedUnderPlan(
                f"The step of {type(spec.model).__name__} runs, but not with this plan applied; its {error.reason}."
            ) from error.__cause__
        plain = _plain_error(spec)
        if plain is None:
            raise StepError(
                f"The step of {type(spec.model).__name__} runs, but recoup cannot follow it; its {error.reason}, only "
                "while it was watched. Please report the model."
            ) from error.__cause__
        if error.reason.startswith("backward"):  # a watched one has autograd's checks in recoup's words
            called = " A step returns its loss, and recoup calls backward: does the step call it too?"
            raise StepError(
                f"The backward of {type(spec.model).__name__} fails on this batch without a plan too."
                f"{called if 'a second time' in str(plain) else ''} Torch says: {' '.join(str(plain).split())}"
            ) from plain
        raise


def try_capture(spec: StepSpec) -> Trace | None:
    """Returns the trace of a plain step, None where it fails: with random numbers that no training draws, it may."""
    try:
        return _capture_fake(spec, None)
    except (RecoupError, Unfollowable):
        return None


def _plain_error(spec: StepSpec) -> Exception | None:
    """Returns what the step raises without a tracker, None if it runs."""
    with untouched_step(spec) as before, before.watching(), execution_context.unwatched():
        batch = real_batch(spec.batch)
        try:
            spec.objective.run(spec.model, batch).backward()  # type: ignore[no-untyped-call]
        except Exception as error:  # user code runs here
            return error
    return None


def _capture_fake(spec: StepSpec, known: Trace | None) -> Trace:
    """Captures with loops folded where their calls are alike; where they turn out not to be, captures again."""
    memory = spec.folding
    if known is not None and (memory is None or not memory.num_calls):
        memory = None
    while True:
        try:
            return _capture_folded(spec, known, memory)
        except Counted:
            continue
        except (Irregular, StepError, Unfollowable) as error:
            if memory is None or not (memory.num_calls or isinstance(error, Irregular)):
                raise
            memory.reasons.append(str(error))
            if known is not None or not memory.exclude(error.path if isinstance(error, Irregular) else ""):
                memory = None


def _capture_folded(spec: StepSpec, known: Trace | None, memory: FoldingMemory | None) -> Trace:
    """Captures with fake tensors and leaves none behind.

    A forward that caches tensors (masks) finds them there in training. So if a capture finds that a second forward runs
    other ops, one runs before the step that is captured. Where tensors are kept out of the snapshot's reach, that first
    forward is a real one. If it finds methods that the step calls, they are noted in another.
    """

    def body(mode: Any, trackers: list[Tracker]) -> Trace:
        return _capture_on(mode, trackers, spec, known, memory)

    began_second, num_methods = spec.carried.differs, len(spec.methods)
    trace, keepers = run_on_fakes(body, is_thorough=known is None)
    is_on_host = next(spec.model.parameters()).device.type == "cpu"  # on a device nothing runs unasked
    if keepers and not spec.carried.keepers and is_on_host:
        spec.carried.keepers.extend(keepers)
    elif (began_second, num_methods) == (spec.carried.differs, len(spec.methods)):
        return trace
    return run_on_fakes(body, is_thorough=True)[0]


def _fill_caches(spec: StepSpec, before: Snapshot) -> None:
    progress.advance(f"one forward for real: tensors are kept in {spec.carried.keepers[0]}")
    with torch.no_grad(), before.watching(), contextlib.suppress(Exception):  # where it fails, the capture says why
        spec.objective.forward(spec.model, real_batch(spec.batch))


def _capture_on(
    mode: Any, trackers: list[Tracker], spec: StepSpec, known: Trace | None, memory: FoldingMemory | None
) -> Trace:
    device = device_of(spec.model)
    with untouched_step(spec) as before, _torch.quiet_fake_errors(), dialect_of(spec, device):
        if spec.carried.keepers:
            _fill_caches(spec, before)
        island = Island(device)
        outside = parameters_outside(spec.model, before)
        old = [(id(p), path) for path, p in spec.model.named_parameters()]
        with mode, fake_parameters(spec.model, device, island) as parameters:
            tracker = tracker_of(spec, device, island, mode)
            trackers.append(tracker)
            results = _results_of(spec, device, mode)
            stepper = _fake_optimizer(spec, parameters, old, outside, results) if known is None else None
            host_bytes = known.optimizer_host_bytes if known is not None else stepper.host_bytes if stepper else 0
            register(spec.model, parameters, tracker)
            tracker.outside = categories_of(before)
            if known is not None:
                state_bytes = sum(s.nbytes for s in known.storages if s.category == "optimizer")
                tracker.add_block(state_bytes, "optimizer", "optimizer state")
            elif stepper is not None:
                for tensor in stepper.state_tensors():
                    tracker.add(tensor, "optimizer", "optimizer state")
                tracker.add_block(stepper.estimated_bytes, "optimizer", "optimizer state (estimated)")
            batch = fake_batch(spec.batch, device, island)
            for tensor in iterate_tensors(batch):
                tracker.add(tensor, "batch", "batch")
            if spec.carried.differs:
                with torch.no_grad():
                    _run_forward(spec, before, device, island, mode, None)
                draw_from(spec.draw, spec.draw_words)
            recorder = CallRecorder(spec.model, tracker, spec.methods if spec.objective.step else None)
            folding = None
            if memory is not None:
                watches, likely = known is None, _longest(batch)
                folding = Folding(spec.model, tracker, recorder, memory, watches=watches, likely=likely)
            with tracker, saving(tracker), contextlib.nullcontext() if folding is None else folding.on():
                source = run_step(
                    spec.model, spec.objective, before, batch, tracker, recorder, backward=True, folding=folding
                )
            gradients = note_gradients(parameters | outside, tracker)
            if stepper is not None:
                tracker.phase = "optimizer"
                with tracker, ScalarsOfFakes():
                    step_optimizer(stepper, parameters, tracker)
                stepper.forget()
            again = _run_forward(spec, before, device, island, mode, memory) if known is None else None
            del gradients
        with without_collector():
            if folding is not None:
                unfold(folding)
            if again is not None and not runs_alike(tracker, again):
                spec.carried.differs = True
            return build_trace(
                tracker=tracker,
                recorder=recorder,
                released=again,
                model=spec.model,
                keep=spec.keep,
                fingerprint=fingerprint(spec.model),
                device=spec.dialect,
                loss_source=source,
                reason="",
                notes=(stepper.note,) if stepper is not None and stepper.note else (),
                optimizer_host_bytes=host_bytes,
            )


def _longest(batch: Any) -> int:
    """Returns the largest dimension of the batch's tensors: a guess at the number of steps of a loop over time."""
    return max((max(t.shape, default=0) for t in iterate_tensors(batch)), default=0)


def _run_forward(
    spec: StepSpec, before: Snapshot, device: str, island: Island, mode: Any, memory: FoldingMemory | None
) -> Tracker | None:
    """Runs the forward with autograd keeping nothing; returns what ran, None if it fails."""
    tracker = tracker_of(spec, device, island, mode)
    for name, parameter in spec.model.named_parameters():
        tracker.add(parameter, "parameter", name)
    for name, buffer in spec.model.named_buffers():
        tracker.add(buffer, "buffer", name)
    tracker.outside = categories_of(before)
    batch = fake_batch(spec.batch, device, island)
    for tensor in iterate_tensors(batch):
        tracker.add(tensor, "batch", "batch")
    hooks = _torch.saved_tensors_hooks(lambda t: None, lambda t: t)
    draw_from(spec.draw, spec.draw_words)
    try:
        recorder = CallRecorder(spec.model, tracker)
        folding = None if memory is None else Folding(spec.model, tracker, recorder, memory)
        with tracker, hooks, contextlib.nullcontext() if folding is None else folding.on():
            run_step(spec.model, spec.objective, before, batch, tracker, recorder, backward=False, folding=folding)
        if folding is not None:
            with without_collector():
                unfold(folding)
    except (RecoupError, Unfollowable):
        return None
    return tracker


def dialect_of(spec: StepSpec, device: str) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which a step on fake tensors of `device` dispatches what the planned card would."""
    is_elsewhere = spec.capability is not None and device == "cpu"
    return cuda_dialect(spec.capability) if is_elsewhere and spec.capability else contextlib.nullcontext()


def tracker_of(spec: StepSpec, device: str, island: Island | None, mode: Any = None) -> Tracker:
    """Returns the tracker of a step's ops, on fake tensors of a mode if there is an island."""
    return Tracker(
        island=island,
        device=device,
        round_bytes=spec.round_bytes,
        dialect=spec.dialect,
        results=_results_of(spec, device, mode),
    )


def _results_of(spec: StepSpec, device: str, mode: Any) -> FakeResults:
    """Returns the cache of fake results for a step on fake tensors of `mode`; None: a step on real tensors."""
    is_elsewhere = spec.capability is not None and device == "cpu" and mode is not None
    return FakeResults(
        mode,
        kernels=cuda_results() if is_elsewhere else None,
        kept=answers_for(spec.capability if is_elsewhere else None),
    )


@contextlib.contextmanager
def untouched_step(spec: StepSpec) -> Iterator[Snapshot]:
    """Restores at the end what the step can reach; no tensor has a gradient inside."""
    with untouched(spec.model, spec.batch, spec.objective.functions, known=spec.known_state.snapshot) as before:
        before.tensors.clear_gradients()
        draw_from(spec.draw, spec.draw_words)
        yield before


def _fake_optimizer(
    spec: StepSpec,
    parameters: dict[str, torch.Tensor],
    old: list[tuple[int, str]],
    outside: dict[str, torch.Tensor],
    results: FakeResults,
) -> OptimizerStep | None:
    """Returns the optimizer over the fake parameters, its state made: a step like all but the first.

    Args:
        outside: parameters that stay as they are: an op on one of them and a fake one sees both as fake.
    """
    if spec.optimizer is None:
        return None
    wrapped = {path: p for path, p in parameters.items() if isinstance(p, nn.Parameter)}
    new_of: dict[int, Any] = {identity: wrapped[path] for identity, path in old if path in wrapped}
    new_of |= {id(p): p for p in outside.values()}
    return prepare_optimizer(
        spec.optimizer,
        new_of,
        list(wrapped.values()),
        foreach=spec.dialect == "cuda",
        under=lambda: KeptAnswers(results),
    )


def _optimizer_state_bytes(spec: StepSpec) -> tuple[int, int, tuple[str, ...]]:
    """Returns the bytes of the optimizer's state on the device and on the host, and sentences, without a step."""
    if spec.optimizer is None:
        return 0, 0, ()
    device = device_of(spec.model)
    with _torch.quiet_fake_errors(), _torch.fake_tensor_mode():
        new_of = {
            id(p): nn.Parameter(fake_like(p, device), requires_grad=p.requires_grad) for p in spec.model.parameters()
        }
        stepper = prepare_optimizer(spec.optimizer, new_of, list(new_of.values()), foreach=spec.dialect == "cuda")
        made = {id(t): t for t in stepper.state_tensors()}
        total = sum(t.numel() * t.dtype.itemsize for t in made.values()) + stepper.estimated_bytes
    note = stepper.note or "the optimizer's step was left out: its state counts, its temporaries do not"
    return total, stepper.host_bytes, (note,)


def _capture_real(spec: StepSpec, reason: str) -> Trace:
    """Runs a real step on the model's own tensors, its optimizer's state estimated; everything is put back."""
    state_bytes, host_bytes, notes = _optimizer_state_bytes(spec)
    with untouched_step(spec) as before, before.watching():
        parameters: dict[str, torch.Tensor] = dict(spec.model.named_parameters())
        parameters |= parameters_outside(spec.model, before)
        tracker = tracker_of(spec, device_of(spec.model), None)
        try:
            register(spec.model, dict(spec.model.named_parameters()), tracker)
            tracker.outside = categories_of(before)
            tracker.add_block(state_bytes, "optimizer", "optimizer state (estimated)")
            batch = real_batch(spec.batch)
            for tensor in iterate_tensors(batch):
                tracker.add(tensor, "batch", "batch")
            recorder = CallRecorder(spec.model, tracker, spec.methods if spec.objective.step else None)
            with tracker, saving(tracker):
                source = run_step(spec.model, spec.objective, before, batch, tracker, recorder, backward=True)
            gradients = note_gradients(parameters, tracker)
            del gradients
            for parameter in parameters.values():
                parameter.grad = None
        except Unfollowable as error:
            raise StepError(f"The step cannot be captured: {error}") from error
        return build_trace(
            tracker=tracker,
            recorder=recorder,
            released=None,
            model=spec.model,
            keep=spec.keep,
            fingerprint=fingerprint(spec.model),
            device=spec.dialect,
            loss_source=source,
            reason=reason,
            notes=notes,
            optimizer_host_bytes=host_bytes,
        )
