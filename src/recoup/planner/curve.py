"""The curve of bytes against time: one simulated plan a point."""

from __future__ import annotations

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
