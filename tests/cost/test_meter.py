"""What is measured on a machine that others use too."""

from __future__ import annotations

import time

import pytest
import torch

from recoup.cost.op_memory import time_call


@pytest.mark.parametrize("num_threads", [1, 2])
def test_time_is_the_least_of_the_runs(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    now = 0.0
    spans = iter([0.03, 0.002, 0.03, 0.03, 0.03])

    def call() -> None:
        nonlocal now
        now += next(spans)

    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    for clock in ("thread_time", "perf_counter"):
        monkeypatch.setattr(time, clock, lambda: now)
    seconds, warm_seconds, spread_seconds = time_call(call, torch.device("cpu"), limit_seconds=0.1, may_be_warm=False)
    assert warm_seconds == seconds
    assert seconds == pytest.approx(0.002)
    assert spread_seconds == pytest.approx(0.028)
    assert list(spans) == [], "to the limit, since no two of the least agree"


def test_ops_find_nothing_of_their_arguments_in_the_cache() -> None:
    """A copy that fits a core's cache takes several times as long from memory."""
    x = torch.ones(1 << 16)
    y = torch.empty_like(x)
    cold, warm, _ = time_call(lambda: y.copy_(x), torch.device("cpu"), limit_seconds=0.05)
    assert cold > 1.5 * warm
