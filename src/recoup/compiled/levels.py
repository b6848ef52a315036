"""The levels of a compiled step that runs: the allocator's account, read off at the calls of its graphs."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from recoup import _torch
from recoup.compiled.combine import StepLevels
from recoup.compiled.schedule import Timeline

CALL_MARK = "recoup compiled graph"  # the `record_function` range around a graph's forward


def meter_levels(
    step: Callable[[], Any], *, device: torch.device, calls: Sequence[str], chosen: Sequence[Timeline]
) -> StepLevels | None:
    """Runs a step and returns its levels; None if graphs did not run in backward in reverse, each once.

    Args:
        device: where the step runs. calls: graphs in the order in which forward calls them. chosen: what the step
            holds, by call.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _torch.MemoryProfiler() as profiler:
            step()
    changes, forwards = _torch.timed_memory_events(profiler, CALL_MARK, device)
    _, backwards = _torch.compiled_backwards(profiler)
    num = len(calls)
    if len(forwards) != num or len(backwards) != num:
        return None
    ranges = [(begin, end) for _, begin, end in (*forwards, *backwards)]
    if any(end > begin for (_, end), (begin, _) in itertools.pairwise(ranges)):
        return None  # one inside of another
    levels, between = [0] * (2 * num), [0] * (num + 1)
    level = at = 0
    for time_ns, change in changes:
        while at < 2 * num and time_ns >= ranges[at][0]:
            levels[at] = level
            at += 1
        level += change
        if at and time_ns <= ranges[at - 1][1]:
            levels[at - 1] = max(levels[at - 1], level)
        else:
            held = at if at <= num else 2 * num - at
            between[held] = max(between[held], level)
    return StepLevels(
        chosen=tuple(chosen),
        forward=tuple(levels[:num]),
        backward=tuple(reversed(levels[num:])),
        between=tuple(between),
    )
