"""Plans for batches of several shapes: one plan a shape, chosen for each batch as it arrives.

    plans = fit_shapes(model, [batch_of(128), batch_of(512), batch_of(2048)], budget="8GiB")
    for batch in loader:                       # nothing changes in the loop
        model(**batch).loss.backward()

A single plan for the longest batch would cost every shorter batch time. Here each shape has its own plan, which changes
only as much as that shape needs. A batch runs under the smallest shape that covers it in every dimension; a smaller
batch under the same plan is assumed to peak no higher. A batch that no shape covers is simulated before it runs, under
the plan of the largest shape: it runs if that fits, otherwise `BatchTooLarge` says what to do.

Backward must come before the next forward of another shape: a region's replay runs under the plan chosen last.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from recoup import api
from recoup._pytree import iterate_tensors
from recoup.capture.capture import capture
from recoup.capture.optimizer import OptimizerLike
from recoup.capture.spec import StepSpec
from recoup.capture.step import Loss, Objective
from recoup.errors import InfeasibleBudget, UsageError
from recoup.integrations.distributed import unwrap
from recoup.integrations.watch import Guard
from recoup.ir.decision import Save
from recoup.ir.plan import Plan
from recoup.runtime.apply import apply_decisions, find_patches
from recoup.runtime.conflicts import refuse_conflicts
from recoup.runtime.patch import PatchedForward, Runner, repatch, unpatch
from recoup.runtime.planned_call import Settings, run_call
from recoup.runtime.rebuild.apply_held import HeldSettings
from recoup.runtime.step_state import StepState

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShapePlan:
    """A plan and the shapes that it is for.

    Attributes:
        plan: the plan.
        shapes: (name or position, shape) of each tensor of its batch, in the order of the names.
    """

    shapes: Shapes
    plan: Plan

    def covers(self, shapes: Shapes) -> bool:
        """Whether a batch of these shapes is at most as large in every dimension."""
        return len(shapes) == len(self.shapes) and all(
            name == known and len(shape) == len(most) and all(a <= b for a, b in zip(shape, most, strict=True))
            for (name, shape), (known, most) in zip(shapes, self.shapes, strict=True)
        )


_Way = tuple[Runner, Settings | HeldSettings]
"""(runner, settings) of a forward; plans by tensor and regions have different runners."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Patched:
    """A module's patched forward and its runner under each plan, in the order of the plans."""

    forward: PatchedForward
    ways: list[_Way]


def _of_this_model(way: _Way, state: StepState, memo: dict[int, Any]) -> _Way:
    """Returns the runner and settings with the state of one model."""
    runner, settings = way
    if isinstance(settings, Settings):
        return runner, dataclasses.replace(settings, state=state)
    return runner, copy.deepcopy(settings, memo)


def shapes_of(batch: Any) -> Shapes:
    """Returns the shapes of a batch's tensors, by name if it is a dict, otherwise by position."""
    if isinstance(batch, dict):
        found = [(str(key), t) for key in sorted(batch, key=str) for t in iterate_tensors(batch[key])]
    else:
        found = [(str(i), t) for i, t in enumerate(iterate_tensors(batch))]
    return tuple((name, tuple(t.shape)) for name, t in found)


class ShapePlans:
    """Plans for several shapes in place on one model, until `remove()` or the end of the `with` block.

    Attributes:
        buckets: the plans, by rising predicted plain peak.
        counts: number of training forwards that ran under each plan.
    """

    def __init__(
        self,
        buckets: tuple[ShapePlan, ...],
        chosen: list[dict[str, _Way]],
        *,
        loss: Loss | None,
        optimizer: OptimizerLike | None,
    ) -> None:
        self.buckets = buckets
        self.counts = [0] * len(buckets)
        self._chosen = chosen
        self._loss = loss
        self._optimizer = optimizer
        self._weighed: list[list[tuple[int, ...]]] = []
        self._inside = False
        self._patched: weakref.WeakKeyDictionary[nn.Module, list[_Patched]] = weakref.WeakKeyDictionary()
        self._hooks: list[Any] = []

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: chooses the plan for the batch.

        Raises:
            BatchTooLarge: if no shape covers the batch and its step would not fit.
        """
        if self._inside or not torch.is_grad_enabled() or torch.compiler.is_compiling() or self._is_suspended(model):
            return
        shapes = shapes_of(kwargs if kwargs and not args else [*args, kwargs])
        index = next((i for i, bucket in enumerate(self.buckets) if bucket.covers(shapes)), len(self.buckets) - 1)
        self._choose(model, index)
        if not self.buckets[index].covers(shapes):
            self._weigh(model, args, kwargs)
        self.counts[index] += 1

    def remove(self) -> None:
        """Restores every forward that was changed; may be called twice."""
        for hook in self._hooks:
            hook.remove()
        for patched in self._patched.values():
            while patched:
                unpatch(patched.pop().forward)
        self._hooks.clear()

    def __enter__(self) -> ShapePlans:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShapePlans:
        """Returns itself: a copy of the model shares it, and its patched forwards are found when it runs."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """State for a pickled model: the plans, without loss and optimizer, which only error messages need."""
        return {**self.__dict__, "_loss": None, "_optimizer": None, "_patched": {}, "_hooks": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _patched=weakref.WeakKeyDictionary())

    def __str__(self) -> str:
        lines = []
        for bucket, count in zip(self.buckets, self.counts, strict=True):
            predicted = bucket.plan.predicted
            words = ", ".join(f"{name} {list(shape)}" for name, shape in bucket.shapes)
            lines.append(
                f"{words}: {len(bucket.plan.regions)} regions, {len(bucket.plan.decisions)} decisions, "
                f"{predicted.extra_time_ratio:+.1%} time, ran {count} times"
            )
        return "\n".join(lines)

    def _install(self, model: nn.Module) -> None:
        self._hooks.append(model.register_forward_pre_hook(self, with_kwargs=True, prepend=True))
        self._choose(model, len(self.buckets) - 1)

    def _choose(self, model: nn.Module, index: int) -> None:
        if model not in self._patched:  # first call of a copy of the model
            self._patched[model] = self._find(model)
        for patched in self._patched[model]:
            patched.forward.runner, patched.forward.settings = patched.ways[index]

    def _is_suspended(self, model: nn.Module) -> bool:
        """Whether the plan is suspended (`plain`); choosing another plan would end that."""
        known = self._patched.get(model)
        forward = known[0].forward if known else find_patches(model)[0]
        return bool(forward.settings.state.suspended)

    def _find(self, model: nn.Module) -> list[_Patched]:
        """Returns a model's patched forwards with their runners under each plan; regions share the model's state."""
        forwards = find_patches(model)
        settings = [s for ways in self._chosen for _, s in ways.values()]
        state = StepState(counts_calls=any(s.state.counts_calls for s in settings if isinstance(s, Settings)))
        memos: list[dict[int, Any]] = [{} for _ in self._chosen]  # each plan by tensor has its own state
        result = []
        for forward in forwards:
            path = forward.settings.path
            idle = Settings(
                path=path,
                decisions=(),
                joins=(),
                derives_below=False,
                buffers=(),
                state=state,
                is_root=path == "",
                hooks={},
            )
            result.append(
                _Patched(
                    forward=forward,
                    ways=[
                        _of_this_model(ways.get(path, (run_call, idle)), state, memo)
                        for ways, memo in zip(self._chosen, memos, strict=True)
                    ],
                )
            )
        return result

    def _weigh(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        budget_bytes = self.buckets[-1].plan.budget_bytes
        how = "fit_shapes with this batch among its `batches`"
        guard = Guard(model, budget_bytes, self._loss, self._optimizer, weighed=self._weighed, how=how)
        with self._aside():
            guard.before_forward(model, args, kwargs, without_plan=lambda: self._lifted(model))

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    @contextlib.contextmanager
    def _lifted(self, model: nn.Module) -> Iterator[None]:
        """Removes the plans from the model inside of the block, so that another plan can be tried."""
        forwards = [patched.forward for patched in self._patched[model]]
        for forward in forwards:
            unpatch(forward)
        try:
            yield
        finally:
            for forward in forwards:
                repatch(forward)


def fit_shapes(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    budget: int | str,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    timed: bool = False,
) -> ShapePlans:
    """Plans for each batch, verifies each plan on its batch, and changes the model in place to choose among the plans.

    The batch whose plain step has the largest peak is planned first: if it does not fit, nothing else is tried.

    Args:
        model: as for `recoup.fit`.
        batches: one batch of each shape, as for `recoup.fit`; the largest of its kind (the longest sequence in a bucket
            of the sampler).
        budget: bytes of one step, as for `recoup.fit`; a percentage is of the largest batch's plain step.
        loss: as for `recoup.fit`.
        optimizer: as for `recoup.fit`.
        timed: as for `recoup.fit`.

    Raises:
        UsageError: if `batches` is empty.
        InfeasibleBudget: if a shape does not fit; the message has the shapes. Also the errors of `recoup.fit`.
    """
    if not batches:
        raise UsageError("fit_shapes needs at least one batch; got none. (recoup.integrations.shapes)")
    refuse_conflicts(model)
    peaks = [
        max(capture(StepSpec(model=model, batch=b, objective=Objective(loss=loss), optimizer=optimizer)).levels())
        for b in batches
    ]
    found = []
    for index in sorted(range(len(batches)), key=lambda i: -peaks[i]):
        batch = batches[index]
        try:
            fit = api.fit(model, batch, budget=budget, loss=loss, optimizer=optimizer, timed=timed)
        except InfeasibleBudget as error:
            error.add_note(f"for the batch of {dict(shapes_of(batch))}")
            raise
        fit.applied.remove()
        budget = fit.plan.budget_bytes  # a percentage is of the first
        found.append(ShapePlan(shapes=shapes_of(batch), plan=fit.plan))
    return apply_shapes(model, found, loss=loss, optimizer=optimizer)


def apply_shapes(
    model: nn.Module,
    buckets: Sequence[ShapePlan],
    *,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
) -> ShapePlans:
    """Changes `model` in place to run each batch under the plan of its shape; returns the handle that undoes it.

    Args:
        model: unwrapped, or wrapped by DDP. Each rank chooses by its own batch. DDP's collectives are the same under
            every plan; FSDP's are not, so there all ranks' batches need the same shape (pad them).
        buckets: `fit_shapes(...).buckets`, or `ShapePlan`s of plans on disk.
        loss: of the training step, for the advice in `BatchTooLarge`.
        optimizer: of the training step, for the advice in `BatchTooLarge`.

    Raises:
        PlanMismatch: if a plan was made for another model.
        ConflictError: if activation checkpointing is on already. The model is unchanged.
    """
    if not buckets:
        raise UsageError("apply_shapes needs at least one plan; got none. (recoup.integrations.shapes)")
    core = unwrap(model)
    ordered = tuple(sorted(buckets, key=lambda bucket: bucket.plan.predicted.plain_peak_bytes))
    chosen: list[dict[str, _Way]] = []
    for bucket in ordered:
        applied = api.apply(core, bucket.plan)
        chosen.append({f.settings.path: (f.runner, f.settings) for f in find_patches(core)})
        applied.remove()
    plans = ShapePlans(ordered, chosen, loss=loss, optimizer=optimizer)
    paths = dict.fromkeys(["", *(path for ways in chosen for path in ways)])
    apply_decisions(core, [Save(path=path) for path in paths])
    plans._install(core)
    return plans
