"""A guard around a running job: larger batches are simulated before they run, and out-of-memory errors are explained.

Before the model runs on a batch that is larger in some dimension than every batch so far, the step is simulated under
fake tensors with the plan in place (about a second, once for each new largest shape). If it is over the budget,
`BatchTooLarge` is raised before anything is allocated. An out-of-memory error inside of the block becomes
`StepOutOfMemory`, which names the modules that held the memory and the budget of a plan that would fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from recoup import api
from recoup._allocation import is_allocation_failure
from recoup._pytree import iterate_tensors, map_tensors
from recoup.analysis.profile import make_profile
from recoup.capture.capture import capture
from recoup.capture.optimizer import OptimizerLike
from recoup.capture.spec import StepSpec
from recoup.capture.step import Loss, Objective
from recoup.cost.caching_allocator import MIN_BLOCK_BYTES
from recoup.cost.devices import get_device
from recoup.cost.roofline import RooflineCost
from recoup.errors import BatchTooLarge, InfeasibleBudget, RecoupError, StepOutOfMemory
from recoup.integrations.distributed import unwrap
from recoup.integrations.watched_steps import WatchedSteps, shapes_text
from recoup.runtime.apply import find_patches, plain
from recoup.runtime.conflicts import refuse_no_module
from recoup.units import format_bytes, parse_bytes


@contextlib.contextmanager
def watch(
    model: nn.Module, *, budget: int | str, loss: Loss | None = None, optimizer: OptimizerLike | None = None
) -> Iterator[WatchedSteps]:
    """Watches the training steps of `model` inside of the block; yields a summary of the steps so far.

    Args:
        model: the model, with or without a plan in place.
        budget: bytes of one step, an int or `"8GiB"`.
        loss: as for `recoup.plan`; needed if the model does not return its loss.
        optimizer: as for `recoup.plan`; needed for its state to be counted.

    Raises:
        BatchTooLarge: from a training forward whose step would not fit, before it runs.
        StepOutOfMemory: in place of torch's out-of-memory error.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> with recoup.watch(model, budget="1GiB") as steps:
        ...     model(torch.randn(256, 64)).mean().backward()
        >>> steps.num_steps
        1
    """
    refuse_no_module(model)
    guard = Guard(model, parse_bytes(budget), loss, optimizer)
    hook = model.register_forward_pre_hook(guard.before_forward, with_kwargs=True, prepend=True)
    try:
        yield guard.steps
    except (MemoryError, RuntimeError, OSError) as error:
        if isinstance(error, RecoupError) or not is_allocation_failure(error):
            raise
        hook.remove()
        raise StepOutOfMemory(guard.explain()) from error
    finally:
        hook.remove()


class Guard:
    """The sizes seen so far, and the last batch (shapes only, and values of integers).

    Attributes:
        weighed: shapes of batches that are known to fit.
        steps: summary of the steps so far.
        how: how a plan that fits is put in place, in words for messages.
    """

    def __init__(
        self,
        model: nn.Module,
        budget_bytes: int,
        loss: Loss | None,
        optimizer: OptimizerLike | None,
        *,
        weighed: list[list[tuple[int, ...]]] | None = None,
        how: str = "recoup.fit(model, batch, budget={budget_bytes})",
    ) -> None:
        self.model = unwrap(model)  # the model inside DDP and torch.compile is simulated
        self.budget_bytes = budget_bytes
        self.loss = loss
        self.optimizer = optimizer
        self.how = how.format(budget_bytes=budget_bytes)
        self.weighed: list[list[tuple[int, ...]]] = [] if weighed is None else weighed
        self.steps = WatchedSteps(budget_bytes)
        self._bounds: list[tuple[list[tuple[int, ...]], int]] = []
        self.batch: Any = None
        self.inside = False

    def before_forward(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        without_plan: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:
        """Simulates the step of a batch that is larger than those seen so far.

        Args:
            without_plan: context that removes the plan in place, so that a plan for this batch can be tried.

        Raises:
            BatchTooLarge: if its step would not fit.
        """
        if self.inside or not torch.is_grad_enabled() or not model.training or torch.compiler.is_compiling():
            return
        shapes = [tuple(t.shape) for t in iterate_tensors([args, kwargs])]
        if any(_covers(known, shapes) for known in self.weighed):
            bounds = [size for known, size in self._bounds if _covers(known, shapes)]
            self.steps.add(shapes, min(bounds, default=self.budget_bytes))
            return
        self.batch = map_tensors(_without_data, kwargs if kwargs and not args else args)
        if args and kwargs:
            return  # no plan can be made for positional and keyword arguments together
        self.inside = True
        try:
            trace = capture(self._spec())
        finally:
            self.inside = False
        peak_bytes = max(trace.levels(), default=0)
        if peak_bytes > self.budget_bytes:
            with contextlib.nullcontext() if without_plan is None else without_plan():
                advice = self._advice()
            raise BatchTooLarge(
                f"A batch of {shapes_text(shapes)} would peak at {format_bytes(peak_bytes)}; the budget is "
                f"{format_bytes(self.budget_bytes)}. It was not run. {advice}"
            )
        self.weighed.append(shapes)
        self._bounds.append((shapes, peak_bytes))
        self.steps.add(shapes, peak_bytes)

    def explain(self) -> str:
        """Returns the memory held by each module, and the plan that would fit, in words."""
        if self.batch is None:
            return "Out of memory before the model ran on a batch in training: its weights alone do not fit."
        self.inside = True
        try:
            with plain(self.model):
                trace = capture(self._spec())
        except RecoupError as error:
            return f"Out of memory. The step could not be profiled: {error}"
        finally:
            self.inside = False
        found = make_profile(RooflineCost(get_device("cpu-generic")).price(trace))
        depth = min((row.depth for row in found.rows if row.depth > 0), default=0)
        rows = sorted((r for r in found.rows if r.depth in (depth, depth + 1)), key=lambda r: -r.saved_bytes)[:4]
        held = ", ".join(f"`{r.path}` {format_bytes(r.saved_bytes)}" for r in rows if r.saved_bytes)
        share = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in found.at_peak[:4])
        return (
            f"Out of memory. Without a plan this step peaks at {format_bytes(found.peak_bytes)} in {found.phase} "
            f"({share}). Saved for backward, by module: {held or 'nothing'}. {self._advice()}"
        )

    def _spec(self) -> StepSpec:
        on_cuda = next((p.device.type for p in self.model.parameters()), "cpu") == "cuda"
        return StepSpec(
            model=self.model,
            batch=self.batch,
            objective=Objective(loss=self.loss),
            optimizer=self.optimizer,
            dialect="cuda" if on_cuda else "cpu",
            round_bytes=MIN_BLOCK_BYTES if on_cuda else 1,
        )

    def _advice(self) -> str:
        """Returns the advice of a message: the plan that fits the budget, or the bytes that are needed."""
        if find_patches(self.model):
            return "Remove the plan (`.remove()`), and call recoup.fit on the largest batch that will come."
        self.inside = True
        try:
            made = api.plan(
                self.model,
                self.batch,
                budget=self.budget_bytes,
                loss=self.loss,
                optimizer=self.optimizer,
                cost=RooflineCost(get_device("cpu-generic")),
            )
        except InfeasibleBudget as error:
            return f"No plan fits either; the smallest reachable peak is {format_bytes(error.minimum_bytes)}."
        except RecoupError as error:
            return f"A plan could not be made: {error}"
        finally:
            self.inside = False
        return f"A plan fits: {self.how} peaks at {format_bytes(made.predicted.peak_bytes)}."


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
    return tensor.detach()


def _covers(known: list[tuple[int, ...]], shapes: list[tuple[int, ...]]) -> bool:
    return len(known) == len(shapes) and all(
        len(a) == len(b) and all(x >= y for x, y in zip(a, b, strict=True)) for a, b in zip(known, shapes, strict=True)
    )
