"""Runs training steps of one model from the same state, again and again, and puts everything back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from recoup._allocation import is_allocation_failure
from recoup._pytree import iterate_tensors
from recoup.capture.optimizer import OptimizerLike, OptimizerStep, prepare_optimizer
from recoup.capture.snapshot import Snapshot, parameters_outside
from recoup.capture.step import Objective, leaves_of
from recoup.errors import RecoupError, StepError
from recoup.evidence.gradients import (
    StepResult,
    take_result,
)
from recoup.evidence.memory import release_unused, storage_bytes
from recoup.runtime import execution_context
from recoup.runtime.offload.saved_tensor import offload
from recoup.runtime.offload.transport import Transport
from recoup.thresholds import SMALL_BYTES


class StepBench:
    """Runs steps of a model from one fixed state, and restores that state after each."""

    def __init__(self, model: nn.Module, batch: Any, objective: Objective, optimizer: OptimizerLike | None) -> None:
        self.model = model
        self.batch = batch
        self.objective = objective
        self.device = next(model.parameters()).device
        release_unused(self.device)
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
        """Lets steps of the optimizer run inside of the block: `restore` puts weights and state back too."""
        changed = [p for p in [*self.model.parameters(), *self._outside.values()] if self._optimizes]
        with self._before.tensors.copied(p for p in changed if p.requires_grad):
            try:
                yield
            finally:
                self.restore()

    def restore(self) -> None:
        """Restores everything that a step can reach; gradients are None afterwards."""
        self._before.restore()
        self._before.renew_iterators()
        torch.clear_autocast_cache()  # inside the user's autocast it holds casts of weights as they were
        self._before.tensors.clear_gradients()
        self.objective.prepare(self.model)
        release_unused(self.device)

    def held_bytes(self) -> int:
        """Returns the bytes allocated before a step: weights, buffers, optimizer state, batch."""
        state = list(self.optimizer.state_tensors()) if self.optimizer is not None else []
        tensors = [*self.model.parameters(), *self.model.buffers(), *iterate_tensors(self.batch), *state]
        tensors += self._before.tensors.touched()
        estimated_bytes = self.optimizer.estimated_bytes if self.optimizer is not None else 0
        estimated_bytes += self.trainable_bytes if self.objective.accumulates else 0
        return storage_bytes(t for t in tensors if t.device.type == self.device.type) + estimated_bytes

    @execution_context.unwatched()
    def step(
        self,
        *,
        take: bool = False,
        times: float | None = None,
        aside: Transport | None = None,
        meter: Callable[[Callable[[], Any]], Any] = lambda run: run(),
    ) -> StepResult | None:
        """Runs one training step; with `take`, returns its result and runs no optimizer step.

        The first with `take` is watched: what it writes is copied before, and so is put back after any other step too.

        Args:
            times: the loss is multiplied by it before backward.
            aside: where saved tensors are moved to.
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

    @execution_context.unwatched()
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
            moving = offload(self.model, transport=aside, min_bytes=SMALL_BYTES)
        with torch.enable_grad():
            with moving:
                loss = self.objective.run(self.model, self.batch)
                loss = loss if times is None else loss * times
            with self._before.tensors.noting_leaves(leaves_of(loss) if not self._is_watched else iter(())):
                loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()
