"""Steps after the first of models whose first forward leaves tensors for the next: masks, tables, a state."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.cost.model import FlopsCost

WIDTH = 16
TABLE: dict[int, torch.Tensor] = {}


class Masked(nn.Module):
    """Attention in the parent's own code, with a mask that the first step makes and keeps, and now and then a log."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) / 4) for _ in range(3))
        self.kept: dict[int, torch.Tensor] = {}
        self.num_steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        for weight in self.weights:
            q, k, v = (x @ weight).chunk(3, -1)
            scores = q @ k.transpose(1, 2) / 4
            n = x.shape[1]
            if n not in self.kept:
                self.kept[n] = torch.ones(n, n).triu(1).mul(-1e9)
            if self.num_steps == 3:
                with torch.no_grad():
                    self.largest = scores.abs().amax()
            x = x + (scores + self.kept[n]).softmax(-1) @ torch.tanh(v)
        return x


class Gated(nn.Module):
    """Products with a table of a global that the first step fills: autograd saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            if WIDTH not in TABLE:
                TABLE[WIDTH] = torch.linspace(0.5, 1, 64 * WIDTH).reshape(64, WIDTH).sin()
            x = torch.tanh((x @ weight) * TABLE[WIDTH])
        return x


class Carrying(Gated):
    """A state from the step before, which the first has not."""

    def __init__(self) -> None:
        super().__init__()
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state is not None:
            x = x + torch.sigmoid(self.state) * x
        x = super().forward(x)
        self.state = x.detach()
        return x


def loss_of(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.pow(2).mean()


def train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for _ in range(5):
        model.zero_grad()
        loss = loss_of(model(x), None)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


@pytest.mark.parametrize("kind", [Masked, Gated, Carrying])
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("budget", ["95%", "90%", "min"])
def test_no_later_step_is_another_than_the_planned_one(
    kind: Callable[[], nn.Module], has_run: bool, budget: str
) -> None:
    def build() -> nn.Module:
        TABLE.clear()
        torch.manual_seed(0)
        model = kind()
        if has_run:
            model(x)
        return model

    x = torch.randn(4, 64, WIDTH, generator=torch.Generator().manual_seed(0))
    plain = train(build(), x)
    model = build()
    plan = recoup.plan(model, (x,), loss=loss_of, budget=budget, cost=FlopsCost(), actions=("rebuild",))
    with recoup.apply(model, plan), warnings.catch_warnings():
        warnings.simplefilter("error")
        if (kind, has_run) in ((Carrying, False), (Masked, True)):  # planned without a state, or with the log
            warnings.filterwarnings("ignore", message=".*(its plan was not made for|over the plan's budget).*")
        planned = train(model, x)
    assert len(plain) == len(planned)
    assert all(map(torch.equal, plain, planned))
