"""The curve of bytes against time: one simulated plan a point, and the largest batch that some plan fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from recoup import progress
from recoup.errors import InfeasibleBudget
from recoup.ir.profile import FrontierPoint
from recoup.planner.driver import Planner
from recoup.planner.strategies.tile import is_tiled


def frontier_points(planner: Planner, *, num_points: int, device: str) -> tuple[FrontierPoint, ...]:
    """Returns plans from the smallest reachable peak to the fastest step, each faster than all smaller ones.

    Args:
        num_points: budgets that are asked for, evenly spaced; those with the same answer are one point.
        device: its name, for the plans.
    """
    fastest = planner.fit(1 << 62) or planner.plain  # not the plain step where scans may take more than they do in it
    candidates = {c.decisions: c for c in (planner.plain, planner.smallest(), fastest)}
    low, high = planner.smallest().peak_bytes, max(planner.plain.peak_bytes, fastest.peak_bytes)
    for i in range(1, num_points - 1):
        candidate = planner.fit(low + (high - low) * i // (num_points - 1))
        if candidate is not None:
            candidates[candidate.decisions] = candidate
    least = planner.smallest()  # the budgets between may have led to a smaller one
    candidates[least.decisions] = least
    if planner.prefers_equal_bits:  # tiles only where nothing else reaches
        reached = min(c.peak_bytes for c in candidates.values() if not is_tiled(c.decisions))
        candidates = {d: c for d, c in candidates.items() if not is_tiled(d) or c.peak_bytes < reached}
    points: list[FrontierPoint] = []
    best: dict[bool, float] = {}
    for candidate in sorted(candidates.values(), key=lambda c: (c.peak_bytes, c.step_seconds)):
        rounds = planner.prefers_equal_bits and is_tiled(candidate.decisions)
        if candidate.step_seconds < best.get(rounds, float("inf")):
            best[rounds] = candidate.step_seconds
            made = planner.plan(
                candidate, budget_bytes=candidate.peak_bytes, budget_text=str(candidate.peak_bytes), device=device
            )
            points.append(
                FrontierPoint(
                    peak_bytes=candidate.peak_bytes,
                    step_seconds=candidate.step_seconds,
                    extra_time_ratio=made.predicted.extra_time_ratio,
                    recomputed_flops=candidate.recomputed_flops,
                    plan=made,
                )
            )
    return tuple(points)


class Fits(Protocol):
    """Whether a step of the given size fits the budget."""

    def __call__(self, size: int, *, metered: bool = ...) -> bool:
        """Answers for one size; `metered`: with the workspace of this machine's kernels, which is slow to meter."""


def largest_size(fits: Fits, errors: Sequence[InfeasibleBudget], *, limit: int, is_metered_last: bool) -> int:
    """Returns the largest size that fits, by doubling and halving.

    Args:
        errors: to which `fits` adds the reason of each size that does not fit. limit: the largest size tried.
        is_metered_last: whether `fits` leaves the kernels' workspace out unless it is told to meter.

    Raises:
        InfeasibleBudget: if size 1 does not fit.
    """
    progress.advance("trying size 1")
    if not fits(1):
        raise errors[-1]
    low, high = 1, 2
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
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
