"""`recoup.hold`: an identity that plans by tensor hold, and ops in place that run again on a copy."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import recoup
from recoup.cost.model import FlopsCost
from recoup.ir.decision import Rebuild
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild import held_recorder


class Dear(nn.Module):
    """Layers whose products may be marked as dear."""

    def __init__(self, *, marks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.marks = marks
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            y = x @ weight
            y = recoup.hold(y) if self.marks else y
            self.last = weakref.ref(y)
            x = x + torch.tanh(y) * torch.sigmoid(y)
        return x


def loss(output: torch.Tensor, batch: object) -> torch.Tensor:
    return output.pow(2).mean()


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss(model(x), x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_hold_is_the_identity() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    held = recoup.hold(x * 2)
    held.sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 2.0))
    integers = torch.arange(5)
    assert recoup.hold(integers).data_ptr() == integers.data_ptr()
    assert not recoup.hold(integers).requires_grad


def test_a_forward_without_a_backward_leaves_nothing() -> None:
    model = Dear(marks=True)
    with apply_decisions(model, [Rebuild(path="")]):
        model(torch.randn(256, 64))
        assert model.last() is None


def test_what_is_marked_never_runs_again() -> None:
    x = torch.randn(256, 64)
    plain = gradients(Dear(marks=False), x)
    again = {}
    for marks in (False, True):
        model = Dear(marks=marks)
        with apply_decisions(model, [Rebuild(path="")]):
            model.zero_grad()
            with FlopCounterMode(display=False) as counter:  # from forward on: ops run again under its modes
                loss(model(x), x).backward()
        again[marks] = counter.get_total_flops()
        assert all(map(torch.equal, plain, [p.grad for p in model.parameters()]))
    once = (3 * 6 - 1) * 2 * 256 * 64 * 64  # three products a layer; the input needs no gradient
    assert again[True] == once < again[False]


def test_a_plan_counts_with_what_is_marked() -> None:
    x = torch.randn(256, 64)
    plan = recoup.plan(Dear(marks=True), (x,), budget="75%", loss=loss, cost=FlopsCost(), actions=("rebuild",))
    assert plan.predicted.peak_bytes <= plan.budget_bytes
    assert plan.predicted.recomputed_flops < 2 * 256 * 64 * 64  # no product


class InPlace(nn.Module):
    """Writes over tensors, over parts of them, and by index."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = torch.arange(x.shape[0]).flip(0)
        y = x @ self.weight
        y[:8] = torch.tanh(x[:8])  # a part of the storage
        y.index_add_(0, order, x)
        z = torch.zeros_like(y).scatter_add_(0, order.unsqueeze(1).expand_as(y), torch.sigmoid(y))
        z.masked_fill_(y > 1.0, 0.5)
        z[:, 3].zero_()
        return torch.exp(z.clamp(max=2.0)) * y


def test_ops_in_place_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_recorder, "MIN_BYTES", 0)
    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(64, 32)
    plain = gradients(model, x)
    with apply_decisions(model, [Rebuild(path="")]) as applied:
        before = applied.log
        assert all(map(torch.equal, plain, gradients(model, x)))
        assert (applied.log - before).num_rederived >= 5
