"""Runs a step under a tracker; errors are attributed to the model, the loss, or recoup."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.capture.draws import Streams
from recoup.capture.folding import Folding
from recoup.capture.module_calls import CallRecorder
from recoup.capture.simulated_transport import SimulatedTransport
from recoup.capture.snapshot import Snapshot
from recoup.capture.step import Objective, leaves_of
from recoup.capture.tracker import Tracker
from recoup.errors import RecoupError, StepError, first_line
from recoup.runtime import execution_context
from recoup.runtime.rebuild.kept import Simple, kept_simply, unpacked


class Unfollowable(Exception):
    """Fake tensors cannot follow the model; carries the reason."""


class Failed(StepError):
    """The user's model or loss raised an error; `reason` says where, and which."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class FailedUnderPlan(StepError):
    """The step runs, but not with the plan that is applied."""


def run_step(
    model: nn.Module,
    objective: Objective,
    before: Snapshot,
    batch: Any,
    tracker: Tracker,
    recorder: CallRecorder,
    *,
    backward: bool,
    folding: Folding | None = None,
) -> str:
    """Runs forward, loss and backward; returns the loss's source.

    The output is let go before backward, as trainers do; a loop that holds its logits needs that much more.

    Args:
        before: the snapshot, to which tensors that get a gradient are added.
    """
    streams = Streams.now()
    with tracker.unobserved():
        accumulated = objective.prepare(model)
    for gradient in accumulated:
        tracker.add(gradient, "gradient", "gradients of earlier micro-batches")
    del accumulated
    try:
        tracker.phase = "forward"
        with objective.autocasting(model):
            with recorder:
                output = objective.forward(model, batch)
            if folding is not None:
                folding.end_forward()
            tracker.phase, tracker.call = "loss", -1
            loss, source = objective.loss_of(output, batch)
        tracker.draws_on_host = streams.drawn_until(Streams.now())
        del output
        if backward:
            tracker.begin_backward(loss)
            with before.tensors.noting_leaves(leaves_of(loss)):
                loss.backward()  # type: ignore[no-untyped-call]
        if tracker.unanswered:  # an `except:` of the model's has eaten it: in training it takes another way
            raise Unfollowable(tracker.unanswered)
        return source
    except (RecoupError, Unfollowable):
        raise
    except _torch.fake_tensor_errors() as error:
        raise Unfollowable(f"{type(error).__name__}: {first_line(error)}") from error
    except Exception as error:  # the user's model and loss run here and may raise anything
        phase = {"forward": "forward", "loss": "loss"}.get(tracker.phase, "backward")
        what = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        message = f"The {phase} of {type(model).__name__} failed on this batch: {what}."
        if (
            phase == "forward"
            and isinstance(error, TypeError)
            and objective.step is None
            and type(batch) in (tuple, list)
        ):
            message += (
                f" The model was called with the batch's {len(batch)} items; if they are inputs and targets, give "
                "inputs=..., targets=... and loss=..., or step=lambda model, batch: ..."
            )
        raise Failed(message, f"{phase} raised {what}") from error


@contextlib.contextmanager
def saving(tracker: Tracker) -> Iterator[None]:
    """Notifies the tracker of every saved tensor: autograd's own and those that the engine keeps."""

    def pack(tensor: torch.Tensor) -> Simple:
        tracker.saved(tensor)
        # With its node it would be a cycle: a saved output is held by the node that made it, and a graph that is
        # dropped before backward would count as alive until Python's collector runs.
        return kept_simply(tensor)

    moving = execution_context.moving_with(SimulatedTransport(tracker, prefetches=tracker.dialect == "cuda"))
    with moving, execution_context.observing(tracker), _torch.saved_tensors_hooks(pack, unpacked):
        yield


def device_of(model: nn.Module) -> str:
    """Returns where a fake step of the model runs: on its own device, on the CPU for one on `meta`."""
    device = next(model.parameters()).device
    return "cpu" if device.type == "meta" else str(device)


def register(model: nn.Module, parameters: dict[str, torch.Tensor], tracker: Tracker) -> None:
    """Tells the tracker of the parameters and the model's buffers, which are there before the step."""
    for name, parameter in parameters.items():
        tracker.add(parameter, "parameter", name)
    for name, buffer in model.named_buffers():
        tracker.add(buffer, "buffer", name)
