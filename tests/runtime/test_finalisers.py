"""What dies runs no Python of ours: an interrupt that lands there would be printed and lost."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.ir.decision import Decision, Recompute, Rederive
from recoup.runtime.apply import apply_decisions
from recoup.runtime.waiting import Waiting
from tests.models import Stack

PLANS: dict[str, list[Decision]] = {
    "rederive": [Rederive(path="")],
    "regions": [Recompute(path=f"layers.{i}", inside="rederive") for i in range(4)],
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("backward", [True, False])
def test_a_graph_dies_without_python(plan: str, backward: bool) -> None:
    model, batch = Stack(), torch.randn(256, 32)
    seen: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "recoup" in frame.f_code.co_filename and "tests" not in frame.f_code.co_filename:
            seen.append(frame.f_code.co_name)

    with apply_decisions(model, PLANS[plan]):
        loss = model(batch).square().mean()
        if backward:
            loss.backward(retain_graph=True)
        gc.collect()
        sys.setprofile(profile)
        try:
            del loss
        finally:
            sys.setprofile(None)
    assert not seen


def test_a_storage_dies_without_python() -> None:
    seen: list[str] = []
    with recoup.rederive():
        x = torch.ones(64, 64, requires_grad=True)
        made = [torch.tanh(x * i) for i in range(5)]
        sys.setprofile(lambda frame, event, argument: seen.append(frame.f_code.co_name) if event == "call" else None)
        try:
            made.clear()
        finally:
            sys.setprofile(None)
    assert not seen


def test_results_live_as_long_as_somebody_waits() -> None:
    waiting, first, second = Waiting(), nn.Identity(), nn.Identity()
    first.ticket, second.ticket = waiting.add(first, 1), waiting.add(second, 5)  # type: ignore[assignment]
    result = torch.ones(3)
    waiting.hold(result, since=3)
    assert waiting.result() is result
    del result
    assert waiting.result() is not None
    del second
    assert waiting.result() is None
    assert waiting
    waiting.serve(first.ticket)  # type: ignore[arg-type]
    assert not waiting
