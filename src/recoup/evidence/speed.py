"""How much slower: plain and planned steps in turn, medians of ratios of neighbours, as many as it takes to be sure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from recoup.thresholds import SAME_SHARE


def time_ratio(
    plain: Callable[[], Any],
    planned: Callable[[], Any],
    *,
    device: torch.device,
    max_seconds: float,
    pairs: int = 5,
    before: Callable[[], Any] = lambda: None,
) -> tuple[float, float]:
    """Returns the median of planned over plain step time, and half the distance between its quartiles.

    Plain and planned steps run in turn, and each is compared with the one before it: a machine that gets slower from
    step to step raises one ratio and lowers the next. Stops once all ratios so far, two at least, lie within
    twice `SAME_SHARE` of each other: after three steps where the machine is quiet.

    Args:
        max_seconds: stop after this long, once two pairs are in.
        pairs: of neighbours, how many at most.
        before: run before each step, its time not taken.
    """

    def once(step: Callable[[], Any]) -> float:
        before()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    ratios: list[float] = []
    begun = time.perf_counter()
    last = once(plain)
    for i in range(pairs):
        now = once(plain if i % 2 else planned)
        ratios.append(last / now if i % 2 else now / last)
        last = now
        is_narrow = max(ratios) - min(ratios) <= 2 * SAME_SHARE
        if len(ratios) >= 2 and (is_narrow or time.perf_counter() - begun > max_seconds):
            break
    ratios.sort()
    quarter = len(ratios) // 4
    return statistics.median(ratios), (ratios[-1 - quarter] - ratios[quarter]) / 2
