"""The largest batch, and the most tokens, for which some plan fits a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from recoup.capture.optimizer import OptimizerLike
from recoup.capture.step import Loss, StepFunction, make_objective
from recoup.cost.devices import get_device
from recoup.cost.model import CostModel
from recoup.cost.roofline import RooflineCost
from recoup.errors import InfeasibleBudget, UsageError
from recoup.ir.lengths import TokenLimits
from recoup.planner.driver import plan_for_budget
from recoup.planner.largest import largest_size
from recoup.planner.request import free_bytes_on, planner_for
from recoup.runtime.as_found import all_or_nothing
from recoup.units import check_budget, check_count, is_minimum

_SHORTER = (4, 16)  # times shorter than the longest sequence: the lengths that are tried where none are named


class _Search:
    """Answers whether the step of a batch fits the budget under some plan, by planning and simulating it."""

    def __init__(
        self, model: nn.Module, make_batch: Any, *, budget: int | str, step: dict[str, Any], planning: dict[str, Any]
    ) -> None:
        check_budget(budget)
        if not callable(make_batch):
            raise UsageError(f"make_batch must be a function from a size to a batch; got {type(make_batch).__name__}.")
        if is_minimum(budget) or (isinstance(budget, str) and budget.strip().endswith("%")):
            raise UsageError(
                f"The largest size needs a budget in bytes ('8GiB'), or 'auto'; {budget!r} changes with the batch."
            )
        self._model, self._budget, self._step, self._planning = model, budget, step, planning
        self._here = planning["device"] in (None, "cpu") and planning["cost"] is None

    def largest(self, make_batch: Callable[[int], Any], *, limit: int, first: int = 1) -> int:
        """Returns the largest size that fits.

        Raises:
            InfeasibleBudget: if size 1 does not.
        """
        errors: list[InfeasibleBudget] = []

        def fits(size: int, *, metered: bool = not self._here) -> bool:
            objective, batch = make_objective(make_batch(size), **self._step)
            planning = self._planning
            if not metered:
                planning = {**planning, "cost": RooflineCost(get_device("cpu-generic"))}
            planner, name, entry = planner_for(self._model, batch, objective=objective, **planning)
            try:
                plan_for_budget(planner, budget=self._budget, free_bytes=free_bytes_on(name, entry), device=name)
            except InfeasibleBudget as error:
                errors.append(error)
                return False
            return True

        return largest_size(fits, errors, limit=limit, first=first, is_metered_last=self._here)


@all_or_nothing
def max_batch(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    *,
    budget: int | str,
    loss: Loss | None = None,
    step: StepFunction | None = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    accumulate: int = 1,
    optimizer: OptimizerLike | None = None,
    device: str | torch.device | None = None,
    actions: Sequence[str] | None = None,
    host_budget: int | str | None = None,
    cost: CostModel | None = None,
    limit: int = 1 << 16,
) -> int:
    """Returns the largest batch size whose simulated step fits the budget under some plan; the next size does not.

    Args:
        model, loss, step, autocast, scaler, accumulate, optimizer, device, actions, host_budget, cost: as for
            `plan`.
        make_batch: returns a batch of the given size (of examples, tokens, pixels: whatever grows).
        budget: absolute bytes or `"auto"`; a percentage and `"min"` have no meaning here.
        limit: the largest size tried.

    Raises:
        UsageError: for a budget that is no number of bytes.
        InfeasibleBudget: if even size 1 does not fit.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        >>> recoup.max_batch(model, lambda n: torch.randn(n, 64), budget="32MiB", device="a100-80gb", limit=64)
        64
    """
    check_count("limit", limit)
    search = _Search(
        model,
        make_batch,
        budget=budget,
        step={"loss": loss, "step": step, "autocast": autocast, "scaler": scaler, "accumulate": accumulate},
        planning={
            "optimizer": optimizer,
            "device": device,
            "actions": actions,
            "host_budget": host_budget,
            "cost": cost,
        },
    )
    return search.largest(make_batch, limit=limit)


@all_or_nothing
def max_tokens(
    model: nn.Module,
    make_batch: Callable[[int, int], Any],
    *,
    budget: int | str,
    multiple_of: int = 128,
    lengths: Sequence[int] | None = None,
    loss: Loss | None = None,
    step: StepFunction | None = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    accumulate: int = 1,
    optimizer: OptimizerLike | None = None,
    device: str | torch.device | None = None,
    actions: Sequence[str] | None = None,
    host_budget: int | str | None = None,
    cost: CostModel | None = None,
    limit: int = 1 << 22,
) -> TokenLimits:
    """Returns the longest sequence that fits the budget alone, and the most examples of shorter ones.

    Every answer is planned and simulated. So is the next size (`multiple_of` tokens more, or one example more, unless
    that is over the limit), which does not fit.

    Args:
        model, loss, step, autocast, scaler, accumulate, optimizer, device, actions, host_budget, cost: as for
            `plan`.
        make_batch: (examples, tokens) -> a batch of so many examples of so many tokens each: padded ones at their
            longest, or one row of packed examples with their position numbers.
        budget: absolute bytes or `"auto"`.
        multiple_of: lengths that are tried are its multiples.
        lengths: lengths in tokens for which the number of examples is maximised; left out: the longest, and a 4th and a
            16th of it.
        limit: the most tokens tried.

    Raises:
        UsageError: for a budget that is no number of bytes, lengths below 1, or none of them in a list of lengths.
        InfeasibleBudget: if one example of `multiple_of` tokens, or of one of the `lengths`, does not fit.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(100, 64), torch.nn.Linear(64, 64))
        >>> def make_batch(examples, tokens):
        ...     return torch.zeros(examples, tokens, dtype=torch.int64)
        >>> recoup.max_tokens(model, make_batch, budget="32MiB", device="a100-80gb", limit=512).most_tokens
        512
    """
    named = _named(lengths)
    for name, value in (("multiple_of", multiple_of), ("limit", limit), *(("lengths", n) for n in named)):
        check_count(name, value)
    if limit < max((multiple_of, *named)):
        raise UsageError(f"limit {limit} is below the shortest length to be tried.")
    search = _Search(
        model,
        make_batch,
        budget=budget,
        step={"loss": loss, "step": step, "autocast": autocast, "scaler": scaler, "accumulate": accumulate},
        planning={
            "optimizer": optimizer,
            "device": device,
            "actions": actions,
            "host_budget": host_budget,
            "cost": cost,
        },
    )
    longest = multiple_of * search.largest(lambda n: make_batch(1, n * multiple_of), limit=limit // multiple_of)

    def of_length(tokens: int) -> Callable[[int], Any]:
        return lambda examples: make_batch(examples, tokens)

    batches = []
    for length in sorted(set(named or (longest, *_shorter(longest, multiple_of))), reverse=True):
        guess = max(longest // length, 1)
        batches.append((length, search.largest(of_length(length), limit=limit // length, first=guess)))
    return TokenLimits(longest_tokens=longest, multiple_of=multiple_of, limit_tokens=limit, batches=tuple(batches))


def _named(lengths: Any) -> tuple[int, ...]:
    """Returns the lengths that were named, which may be other than numbers; none if they were left out.

    Raises:
        UsageError: if they are no list, or an empty one.
    """
    if lengths is None:
        return ()
    try:
        named = tuple(lengths)
    except TypeError:
        raise UsageError(f"lengths must be a list of whole numbers; got {lengths!r}. Write [128, 512].") from None
    if not named:
        raise UsageError(
            f"lengths names no length; got {lengths!r}. Name one, [128], or leave it out: then the longest and shorter "
            "ones are tried."
        )
    return named


def _shorter(longest: int, multiple_of: int) -> list[int]:
    """Returns the lengths tried where none are named, besides the longest."""
    return [max(longest // share // multiple_of, 1) * multiple_of for share in _SHORTER]
