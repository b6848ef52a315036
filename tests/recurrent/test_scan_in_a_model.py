"""A scan inside of a model that `fit` plans: priced, exact, and its own error where its own budget is too small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import InfeasibleBudget
from recoup.recurrent import scan


class Model(nn.Module):
    """A recurrent trunk by `scan`, then a wide head whose activations plans can recompute."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 8)
        self.head = nn.Sequential(nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4))
        self.options = options

    def step(self, h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.cell(x, h)
        return h, h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ys: torch.Tensor = scan(self.step, x, x.new_zeros(x.shape[1], 8), **self.options)[1]
        return self.head(ys)


def _loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, pytest.param({"slots": 3}, marks=pytest.mark.slow)], ids=["chunks", "slots"])
def test_fit_plans_around_a_scan(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Model(**options), torch.randn(20, 16, 6)
    fitted = recoup.fit(model, x, budget="80%", loss=_loss)
    evidence = fitted.evidence
    assert evidence.gradients_equal
    assert evidence.peak_bytes <= 0.8 * evidence.baseline_peak_bytes
    assert evidence.peak_bytes == pytest.approx(fitted.plan.predicted.peak_bytes, rel=0.05)


@pytest.mark.slow
def test_a_scans_own_budget_is_its_own_error() -> None:
    torch.manual_seed(0)
    with pytest.raises(InfeasibleBudget, match=r"recoup\.recurrent\.scan: budget .* one taped step takes"):
        recoup.fit(Model(budget=2000), torch.randn(20, 16, 6), budget="80%", loss=_loss)


@pytest.mark.parametrize("kind", ["a module's output", "a parameter of the cell", "another scan's last state"])
def test_a_first_state_that_depends_on_what_the_step_reads(kind: str) -> None:
    """Its graph is no part of the steps' tape: the captured parameters' gradients of both ways are summed."""

    class Started(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.init = nn.GRUCell(8, 8), nn.Linear(8, 8)

        def step(self, h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.cell(x, h)
            return h, h

        def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
            if kind == "a module's output":
                first = self.init(x[0])
            elif kind == "a parameter of the cell":
                first = self.cell.bias_hh[:8].expand(x.shape[1], 8)
            else:
                first = scan(self.step, x, x.new_zeros(x.shape[1], 8), **options)[0]
            ys: torch.Tensor = scan(self.step, x, first, **options)[1]
            return ys.square().mean()

    torch.manual_seed(0)
    model, x = Started(), torch.randn(9, 4, 8)
    found = []
    for options in ({}, {"budget": "1GiB"}):  # the latter tapes all steps at once
        model.zero_grad()
        model(x, **options).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))
    model.zero_grad()
    plan = recoup.plan(model, x, budget="100%", loss=lambda out, batch: out)
    assert recoup.verify(model, plan, x, loss=lambda out, batch: out, timed=False).exact
