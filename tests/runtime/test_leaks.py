"""Nothing is left behind: with the garbage collector off, live tensors and memory stay flat over steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from recoup.ir.decision import Recompute, Rederive
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions
from tests.collector import live_tensors, resting
from tests.models import Block, Stack


@pytest.fixture
def no_collector() -> Iterator[None]:
    with resting():
        yield


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


PLANS = {
    "regions": [Recompute(path=f"layers.{i}") for i in range(4)],
    "span, rederived": [
        Rederive(path=""),
        Recompute(path="layers.0", span=("layers.1",), inside="rederive"),
        Recompute(path="layers.2.up"),
    ],
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.slow
def test_hundred_steps_leave_nothing(plan: str, backward: bool, no_collector: None) -> None:
    model = Stack(batch_norm=True)
    batch = torch.randn(64, 32)
    outputs = []
    with apply_decisions(model, PLANS[plan]):

        def step() -> None:
            loss = model(batch)
            outputs.append(weakref.ref(loss))
            if backward:
                loss.backward()
                model.zero_grad()

        for _ in range(10):
            step()
        tensors, resident = live_tensors(), _resident_bytes()
        for _ in range(100):
            step()
        assert live_tensors() == tensors
        assert _resident_bytes() - resident < 4 << 20
    assert all(ref() is None for ref in outputs)


def test_a_step_that_ends_in_an_exception_leaves_nothing(no_collector: None) -> None:
    model = Stack()
    batch = torch.randn(64, 32)
    with apply_decisions(model, PLANS["regions"]):

        def failing() -> None:
            loss = model(batch)
            with torch.no_grad():
                model.layers[0].up.weight.add_(0.0)
            try:
                loss.backward()
            except RuntimeError:
                model.zero_grad()
            else:
                raise AssertionError("the changed weight must be noticed")

        for _ in range(5):
            failing()
        gc.collect()  # a traceback and its frames are a cycle of Python's own
        tensors = live_tensors()
        for _ in range(20):
            failing()
        gc.collect()
        assert live_tensors() == tensors


class Long(nn.Module):
    def __init__(self, num_calls: int) -> None:
        super().__init__()
        self.block = Block(8)
        self.num_calls = num_calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.num_calls):
            x = self.block(x, scale=0.01)
        return x.square().mean()


@pytest.mark.slow
def test_two_thousand_regions_in_one_graph(no_collector: None) -> None:
    torch.manual_seed(0)
    model, batch = Long(2000), torch.randn(4, 8)
    torch.manual_seed(1)
    model(batch).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    before = execution_context.counters()[0]
    tensors = live_tensors()
    with apply_decisions(model, [Recompute(path="block")]):
        torch.manual_seed(1)
        model(batch).backward()
    assert execution_context.counters()[0] - before == 2000
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    model.zero_grad()
    assert live_tensors() == tensors


class _Chain(nn.Module):
    """A hundred ops that each save a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = torch.tanh(x)
        return x


def test_a_region_keeps_few_objects_that_the_collector_looks_at(no_collector: None) -> None:
    """They bring a full collection nearer, which takes longer than a small step: the two that are needed a tensor."""
    model, x = nn.Sequential(_Chain()), torch.randn(4, 4, requires_grad=True)
    with apply_decisions(model, [Recompute(path="0")]):
        model(x).sum().backward()
        before = len(gc.get_objects())
        y = model(x)
        assert (len(gc.get_objects()) - before) / 100 < 3
    y.sum().backward()
