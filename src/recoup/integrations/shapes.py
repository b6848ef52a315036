"""Plans for batches of several shapes: the largest planned first, the one that fits a batch chosen as it arrives.

    plans = fit_shapes(model, [batch_of(128), batch_of(512), batch_of(2048)], budget="8GiB")
    for batch in loader:                       # nothing changes in the loop
        model(**batch).loss.backward()

One plan for the longest batch makes every shorter one pay for it. Here each shape has its own, as little as that shape
needs. A batch runs under the smallest shape that covers it in every dimension; a smaller batch under the same plan is
taken to peak no higher. A batch that no shape covers is weighed before it runs, under the plan of the largest: it runs
if that fits, and `BatchTooLarge` says what to do if not.

Backward must come before the next forward of another shape: a region's replay finds the plan that is chosen then.
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
from recoup.capture.capture import StepSpec, capture
from recoup.capture.optimizer import OptimizerLike
from recoup.capture.step import Loss, Objective
from recoup.errors import InfeasibleBudget, UsageError
from recoup.integrations.distributed import unwrap
from recoup.integrations.watch import Guard
from recoup.ir.decision import Save
from recoup.ir.plan import Plan
from recoup.runtime.apply import apply_decisions, find_patches
from recoup.runtime.conflicts import refuse_conflicts
from recoup.runtime.patch import PatchedForward, Runner, repatch, unpatch
from recoup.runtime.planned_call import Settings, StepState, run_call
from recoup.runtime.rebuild.apply_held import HeldSettings

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShapePlan:
    """A plan and the batches it is for.

    Attributes:
        shapes: (name or position, shape) of each tensor of the batch it was made for, in the order of the names.
    """

    shapes: Shapes
    plan: Plan

    def covers(self, shapes: Shapes) -> bool:
        """Whether a batch of these shapes is no larger in any dimension."""
        return len(shapes) == len(self.shapes) and all(
            name == known and len(shape) == len(most) and all(a <= b for a, b in zip(shape, most, strict=True))
            for (name, shape), (known, most) in zip(shapes, self.shapes, strict=True)
        )


_Way = tuple[Runner, Settings | HeldSettings]
"""What runs a forward, and its settings: a plan by tensor runs it by another function than regions do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Patched:
    """A module's patched forward and what runs it under each plan, in the order of the plans."""

    forward: PatchedForward
    ways: list[_Way]


def _of_this_model(way: _Way, state: StepState, memo: dict[int, Any]) -> _Way:
    """Returns what runs a forward of one model, with that model's state."""
    runner, settings = way
    if isinstance(settings, Settings):
        return runner, dataclasses.replace(settings, state=state)
    return runner, copy.deepcopy(settings, memo)


def shapes_of(batch: Any) -> Shapes:
    """Returns the shapes of a batch's tensors: by name if it is a dict, else by position."""
    if isinstance(batch, dict):
        found = [(str(key), t) for key in sorted(batch, key=str) for t in iterate_tensors(batch[key])]
    else:
        found = [(str(i), t) for i, t in enumerate(iterate_tensors(batch))]
    return tuple((name, tuple(t.shape)) for name, t in found)


class ShapePlans:
    """Plans for several shapes in place on one model; `remove()`, or leaving the block, takes them away.

    Attributes:
        buckets: by predicted plain peak, the smallest first.
        counts: how many training forwards ran under each.
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
        """Chooses the plan for the batch; the forward pre-hook of the model.

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
        """Restores every forward that was changed; safe to call twice."""
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
        """A copy of the model shares this: its patched forwards are found when it runs."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What goes with a pickled model: the plans; not the loss and the optimizer, which only advice needs."""
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
        if model not in self._patched:  # a copy of the model is met here for the first time
            self._patched[model] = self._find(model)
        for patched in self._patched[model]:
            patched.forward.runner, patched.forward.settings = patched.ways[index]

    def _is_suspended(self, model: nn.Module) -> bool:
        """Whether the model runs as if there was no plan (`plain`), to which another plan would put an end."""
        known = self._patched.get(model)
        forward = known[0].forward if known else find_patches(model)[0]
        return bool(forward.settings.state.suspended)

    def _find(self, model: nn.Module) -> list[_Patched]:
        """Returns a model's patched forwards, and what runs each under each plan; regions share the model's state."""
        forwards = find_patches(model)
        settings = [s for ways in self._chosen for _, s in ways.values()]
        state = StepState(counts_calls=any(s.state.counts_calls for s in settings if isinstance(s, Settings)))
        memos: list[dict[int, Any]] = [{} for _ in self._chosen]  # a plan by tensor has a state of its own
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
        """Takes the plans off the model inside the block, so that another can be tried."""
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
    """Plans for each batch, proves each plan on its batch, and changes the model in place to choose among them.

    The batch whose plain step takes the most is first: if it does not fit, nothing else is tried.

    Args:
        batches: one of each shape; see `recoup.plan` for what a batch is. They should be the largest of their kind
            (the longest sequence a bucket of the sampler lets through).
        budget: bytes of one step, as for `recoup.fit`; a percentage is of the largest batch's plain step.
        loss, optimizer, timed: as for `recoup.fit`.

    Raises:
        UsageError: without a batch.
        InfeasibleBudget: with the shapes that do not fit. What `recoup.fit` raises.
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
        model: bare, or wrapped by DDP. Ranks choose by their own batch. DDP's collectives are the same under any plan;
            those of FSDP are not, so there every rank's batch must have the same shape (pad to it).
        buckets: from `fit_shapes(...).buckets`, or made by hand from plans on disk.
        loss, optimizer: of the training step, for what is advised when a batch does not fit.

    Raises:
        PlanMismatch: if a plan was made for another model.
        ConflictError: if activation checkpointing is on already. The model is unchanged then.
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
