"""Captures one training step as a `Trace`, without touching the model.

Two runs under fake tensors: the step as it is (forward, loss, backward, optimizer), and its forward again with
autograd keeping nothing, which tells when each storage would be let go if it were not saved. Where fake tensors cannot
follow the model (data-dependent shapes, `.item()` on an activation) the step is run for real, and the reason kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup._pytree import iterate_tensors, map_tensors
from recoup.capture.dialect import cuda_dialect, cuda_results
from recoup.capture.fakify import fake_batch, fake_like, swap_parameters
from recoup.capture.fingerprint import fingerprint
from recoup.capture.folding.fold import Folding
from recoup.capture.folding.unfold import unfold
from recoup.capture.folding.zones import Counted, FoldingMemory, Irregular
from recoup.capture.island import Island
from recoup.capture.module_calls import CallRecorder
from recoup.capture.optimizer import OptimizerLike, OptimizerStep, ScalarsOfFakes, prepare_optimizer
from recoup.capture.simulated_transport import SimulatedTransport
from recoup.capture.snapshot import untouched
from recoup.capture.step import Loss, call_model, loss_of
from recoup.capture.trace import build_trace
from recoup.capture.tracker import Tracker
from recoup.errors import RealStepWarning, RecoupError, StepError
from recoup.ir.trace import Trace
from recoup.runtime import execution_context

_OLD_THRESHOLD = 1000  # collections of the middle generation before one of the old


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One training step, as the user gave it.

    Attributes:
        dialect: "cpu" or "cuda": whose side outputs, optimizer and allocator are counted.
        capability: compute capability of a card that is not here, whose choice of ops is followed; None: the ops are
            those of the model's own device.
        round_bytes: the allocator's granularity.
        keep: paths of modules whose forward runs once: no region and no tile has them, or what is around them, in it.
        folding: what captures of this step learn of its loops, for the next; None: they are captured in full.
    """

    model: nn.Module
    batch: Any
    loss: Loss | None = None
    optimizer: OptimizerLike | None = None
    dialect: str = "cpu"
    capability: tuple[int, int] | None = None
    round_bytes: int = 1
    keep: frozenset[str] = frozenset()
    folding: FoldingMemory | None = dataclasses.field(default_factory=FoldingMemory, compare=False)


class _Unfollowable(Exception):
    """Fake tensors cannot follow the model; carries the reason."""


def capture(spec: StepSpec, *, known: Trace | None = None) -> Trace:
    """Returns the trace of one step with what is applied to the model now (nothing, or a plan).

    Args:
        known: the plain step's trace. With it only forward, loss and backward are run: the optimizer's state is taken
            over as one block, its step is left out, and `released_op` of storages is not looked for.

    Raises:
        StepError: if the step itself fails.
    """
    if not any(True for _ in spec.model.parameters()):
        raise StepError(
            f"{type(spec.model).__name__} has no parameters; there is no training step to plan. Pass the nn.Module "
            "that holds the weights."
        )
    on_meta = any(p.device.type == "meta" for p in spec.model.parameters())
    try:
        return _capture_fake(spec, known)
    except _Unfollowable as error:
        reason = str(error)
    except StepError as error:
        if on_meta:
            raise
        reason = str(error)  # an op may run and have no fake kernel, or one that is pickier: the real step decides
    if on_meta:
        raise StepError(
            f"The step cannot be followed without data ({reason}), and the model has none (it is on `meta`). Build "
            "it on a real device."
        )
    if _device_of(spec.model).startswith("cuda"):
        warnings.warn(
            f"The step of {type(spec.model).__name__} cannot be followed without data ({reason}): a real one is run on "
            f"{_device_of(spec.model)}, and takes the memory and the time of one. [E301]",
            RealStepWarning,
            stacklevel=2,
        )
    try:
        return _capture_real(spec, reason)
    except StepError as error:
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
        raise StepError(
            f"The step cannot be followed without data ({reason}), and there is no memory for a real one on "
            f"{_device_of(spec.model)}. Plan with a smaller batch, or branch on shapes and token ids alone."
        ) from error


class _Enough(BaseException):
    """Ends a forward of which only the beginning is wanted; no error, so no model's `except` may eat it."""


def levels_after_calls(spec: StepSpec, path: str, counts: tuple[int, ...]) -> list[int]:
    """Returns the bytes that are alive when the module at `path` was called so many times, with what is applied now.

    Only the forward up to there is run; the list is shorter if there are fewer calls.

    Args:
        counts: rising numbers of calls.

    Raises:
        StepError: if fake tensors cannot follow the step.
    """
    device, levels = _device_of(spec.model), []
    with untouched(spec.model), _torch.quiet_fake_errors(), _dialect(spec, device), _torch.fake_tensor_mode():
        island = Island(device)
        parameters = swap_parameters(spec.model, device, island)
        tracker = _tracker(spec, device, island)
        _register(spec.model, parameters, tracker)
        batch = fake_batch(spec.batch, device, island)
        for tensor in iterate_tensors(batch):
            tracker.add(tensor, "batch", "batch")
        recorder = CallRecorder(spec.model, tracker)
        num_calls = 0

        def watch(called: str, parent: int) -> None:
            nonlocal num_calls
            if called != path:
                return
            if num_calls in counts:
                levels.append(sum(s.nbytes for s in tracker.storages if s.free_op < 0))
            if num_calls == counts[-1]:
                raise _Enough
            num_calls += 1

        recorder.watcher = watch
        try:
            with tracker, _saving(tracker):
                _run(spec, batch, tracker, recorder, backward=False)
        except _Enough:
            pass
        except _Unfollowable as error:
            raise StepError(f"The step cannot be followed without data: {error}") from error
    return levels


def _run(
    spec: StepSpec,
    batch: Any,
    tracker: Tracker,
    recorder: CallRecorder,
    *,
    backward: bool,
    folding: Folding | None = None,
) -> str:
    """Runs forward, loss and backward; returns the loss's source.

    The output is let go before backward, as trainers do; a loop that holds its logits needs that much more.
    """
    model = spec.model
    try:
        tracker.phase = "forward"
        with recorder:
            output = call_model(model, batch)
        if folding is not None:
            folding.end_forward()
        tracker.phase, tracker.call = "loss", -1
        loss, source = loss_of(output, batch, spec.loss)
        del output
        if backward:
            tracker.phase = "backward"
            loss.backward()  # type: ignore[no-untyped-call]
        return source
    except RecoupError:
        raise
    except _torch.fake_tensor_errors() as error:
        raise _Unfollowable(f"{type(error).__name__}: {_first_line(error)}") from error
    except Exception as error:  # the user's model and loss run here and may raise anything
        phase = {"forward": "forward", "loss": "loss"}.get(tracker.phase, "backward")
        raise StepError(
            f"The {phase} of {type(model).__name__} failed on this batch: {type(error).__name__}: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def _capture_fake(spec: StepSpec, known: Trace | None) -> Trace:
    """Captures with the loops folded as far as they are alike; a step that turns out not to be is captured again."""
    memory = spec.folding
    if known is not None and (memory is None or not memory.num_calls):
        memory = None
    while True:
        try:
            return _capture_folded(spec, known, memory)
        except Counted:
            continue
        except (Irregular, StepError, _Unfollowable) as error:
            if memory is None or not (memory.num_calls or isinstance(error, Irregular)):
                raise
            memory.reasons.append(str(error))
            if known is not None or not memory.exclude(error.path if isinstance(error, Irregular) else ""):
                memory = None


def _capture_folded(spec: StepSpec, known: Trace | None, memory: FoldingMemory | None) -> Trace:
    device = _device_of(spec.model)
    with untouched(spec.model), _torch.quiet_fake_errors(), _dialect(spec, device), _few_full_collections():
        mode = _torch.fake_tensor_mode()
        old = [(id(p), path) for path, p in spec.model.named_parameters()]
        with mode:
            island = Island(device)
            parameters = swap_parameters(spec.model, device, island)
            tracker = _tracker(spec, device, island)
            stepper = _fake_optimizer(spec, parameters, old) if known is None else None
            _register(spec.model, parameters, tracker)
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
            recorder = CallRecorder(spec.model, tracker)
            folding = None
            if memory is not None:
                watches, likely = known is None, _longest(batch)
                folding = Folding(spec.model, tracker, recorder, memory, watches=watches, likely=likely)
            with tracker, _saving(tracker), contextlib.nullcontext() if folding is None else folding.on():
                source = _run(spec, batch, tracker, recorder, backward=True, folding=folding)
            gradients = _note_gradients(parameters, tracker)
            if stepper is not None:
                tracker.phase = "optimizer"
                with tracker, ScalarsOfFakes():
                    _step_optimizer(stepper, parameters, tracker)
            calls_released = _release_run(spec, device, island, memory) if known is None else None
            del gradients
        with _without_collector():
            if folding is not None:
                unfold(folding)
            return build_trace(
                tracker=tracker,
                recorder=recorder,
                released=calls_released,
                model=spec.model,
                keep=spec.keep,
                fingerprint=fingerprint(spec.model),
                device=spec.dialect,
                loss_source=source,
                reason="",
                notes=(stepper.note,) if stepper is not None and stepper.note else (),
            )


def _longest(batch: Any) -> int:
    """Returns the largest dimension of the batch's tensors: what a loop over time is most likely to run over."""
    return max((max(t.shape, default=0) for t in iterate_tensors(batch)), default=0)


@contextlib.contextmanager
def _few_full_collections() -> Iterator[None]:
    """Has Python's collector look at what is old but rarely: records pile up that are in no cycle."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, max(old, _OLD_THRESHOLD))
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Lets Python's collector rest while many small objects are made, none in a cycle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _release_run(spec: StepSpec, device: str, island: Island, memory: FoldingMemory | None) -> Tracker | None:
    """Runs the forward once more with autograd keeping nothing; None if it does not run the same ops."""
    tracker = _tracker(spec, device, island)
    for name, parameter in spec.model.named_parameters():
        tracker.add(parameter, "parameter", name)
    for name, buffer in spec.model.named_buffers():
        tracker.add(buffer, "buffer", name)
    batch = fake_batch(spec.batch, device, island)
    for tensor in iterate_tensors(batch):
        tracker.add(tensor, "batch", "batch")
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: None, lambda t: t)
    try:
        recorder = CallRecorder(spec.model, tracker)
        folding = None if memory is None else Folding(spec.model, tracker, recorder, memory)
        with tracker, hooks, contextlib.nullcontext() if folding is None else folding.on():
            _run(spec, batch, tracker, recorder, backward=False, folding=folding)
        if folding is not None:
            with _without_collector():
                unfold(folding)
    except (RecoupError, _Unfollowable):
        return None
    return tracker


@contextlib.contextmanager
def _saving(tracker: Tracker) -> Iterator[None]:
    """Has the tracker told of every saved tensor: autograd's own and those the engine keeps."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tracker.saved(tensor)
        return tensor

    moving = execution_context.moving_with(SimulatedTransport(tracker, prefetches=tracker.dialect == "cuda"))
    with moving, execution_context.observing(tracker), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield


def _dialect(spec: StepSpec, device: str) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which a step on fake tensors of `device` dispatches what the planned card would."""
    is_elsewhere = spec.capability is not None and device == "cpu"
    return cuda_dialect(spec.capability) if is_elsewhere and spec.capability else contextlib.nullcontext()


def _tracker(spec: StepSpec, device: str, island: Island | None) -> Tracker:
    kernels = cuda_results() if spec.capability is not None and device == "cpu" and island is not None else None
    return Tracker(island=island, device=device, round_bytes=spec.round_bytes, dialect=spec.dialect, kernels=kernels)


def _device_of(model: nn.Module) -> str:
    device = next(model.parameters()).device
    return "cpu" if device.type == "meta" else str(device)


def _register(model: nn.Module, parameters: dict[str, torch.Tensor], tracker: Tracker) -> None:
    for name, parameter in parameters.items():
        tracker.add(parameter, "parameter", name)
    for name, buffer in model.named_buffers():
        tracker.add(buffer, "buffer", name)


def _fake_optimizer(
    spec: StepSpec, parameters: dict[str, torch.Tensor], old: list[tuple[int, str]]
) -> OptimizerStep | None:
    """Returns the optimizer over the fake parameters, its state made: a step like all but the first."""
    if spec.optimizer is None:
        return None
    wrapped = {path: p for path, p in parameters.items() if isinstance(p, nn.Parameter)}
    new_of = {identity: wrapped[path] for identity, path in old if path in wrapped}
    return prepare_optimizer(spec.optimizer, new_of, list(wrapped.values()), foreach=spec.dialect == "cuda")


def _optimizer_state_bytes(spec: StepSpec) -> tuple[int, tuple[str, ...]]:
    """Returns the bytes of the optimizer's state, and sentences about them, without a step of the model."""
    if spec.optimizer is None:
        return 0, ()
    device = _device_of(spec.model)
    with _torch.quiet_fake_errors(), _torch.fake_tensor_mode():
        new_of = {
            id(p): nn.Parameter(fake_like(p, device), requires_grad=p.requires_grad) for p in spec.model.parameters()
        }
        stepper = prepare_optimizer(spec.optimizer, new_of, list(new_of.values()), foreach=spec.dialect == "cuda")
        made = {id(t): t for t in stepper.state_tensors()}
        total = sum(t.numel() * t.dtype.itemsize for t in made.values()) + stepper.estimated_bytes
    return total, (stepper.note or "the optimizer's step was left out: its state counts, its temporaries do not",)


def _step_optimizer(stepper: OptimizerStep, parameters: dict[str, torch.Tensor], tracker: Tracker) -> None:
    """Steps. What an optimizer holds while it runs the training step again counts as there throughout the step."""
    first_op, held_bytes = len(tracker.ops), 0

    def closure() -> torch.Tensor:
        nonlocal held_bytes
        own = (s.nbytes for s in tracker.storages if s.free_op < 0 and s.alloc_op >= first_op)
        held_bytes = max(held_bytes, sum(own))
        for parameter in parameters.values():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        return torch.empty((), device=next(iter(parameters.values())).device)

    stepper.step(closure)
    tracker.add_block(held_bytes, "optimizer", "held by the optimizer while it runs the step again")


def _note_gradients(parameters: dict[str, torch.Tensor], tracker: Tracker) -> list[torch.Tensor]:
    gradients = []
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            index = tracker.find(parameter.grad)
            if index is not None:
                tracker.storages[index].category = "gradient"
                tracker.storages[index].label = f"gradient of {name}"
            gradients.append(parameter.grad)
    return gradients


def _capture_real(spec: StepSpec, reason: str) -> Trace:
    """Runs a real step on the model's own tensors, its optimizer's state estimated; everything is put back."""
    state_bytes, notes = _optimizer_state_bytes(spec)
    with untouched(spec.model):
        parameters: dict[str, torch.Tensor] = dict(spec.model.named_parameters())
        for parameter in parameters.values():
            parameter.grad = None
        tracker = _tracker(spec, _device_of(spec.model), None)
        try:
            _register(spec.model, parameters, tracker)
            tracker.add_block(state_bytes, "optimizer", "optimizer state (estimated)")
            batch = map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), spec.batch)
            for tensor in iterate_tensors(batch):
                tracker.add(tensor, "batch", "batch")
            recorder = CallRecorder(spec.model, tracker)
            with tracker, _saving(tracker):
                source = _run(spec, batch, tracker, recorder, backward=True)
            gradients = _note_gradients(parameters, tracker)
            del gradients
            for parameter in parameters.values():
                parameter.grad = None
        except _Unfollowable as error:
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
        )
