"""The largest size of a step that some plan fits into a budget: doubling, then halving, on simulated plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from recoup import progress
from recoup.errors import InfeasibleBudget


class Fits(Protocol):
    """Whether a step of the given size fits the budget."""

    def __call__(self, size: int, *, metered: bool = ...) -> bool:
        """Answers for one size; `metered`: with the workspace of this machine's kernels, which is slow to meter."""


def largest_size(
    fits: Fits, errors: Sequence[InfeasibleBudget], *, limit: int, is_metered_last: bool, first: int = 1
) -> int:
    """Returns the largest size that fits, by doubling and bisection; the next size does not fit.

    Args:
        first: the size tried first, a guess at the answer.
        errors: to which `fits` adds the reason of each size that does not fit.
        limit: the largest size tried.
        is_metered_last: whether `fits` leaves the kernels' workspace out unless it is told to meter.

    Raises:
        InfeasibleBudget: if size 1 does not fit.
    """
    low, high = 0, min(first, limit)
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    if low == 0 and high > 1:  # the guess was too large: from one up to it
        low = 1 if fits(1) else 0
    if low == 0:
        raise errors[-1]
    while high - low > 1:
        middle = (low + high) // 2
        progress.advance(f"trying size {middle}")
        low, high = (middle, high) if fits(middle) else (low, middle)
    # So far without the workspace of this machine's kernels, which is slow to meter: now with it, from there down.
    stride = 1
    while is_metered_last and not fits(low, metered=True):
        progress.advance(f"size {low} fits but for its kernels' workspace")
        if low == 1:
            raise errors[-1]
        low, high, stride = max(low - stride, 1), low, stride * 2
    while is_metered_last and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle, metered=True) else (low, middle)
    return low
