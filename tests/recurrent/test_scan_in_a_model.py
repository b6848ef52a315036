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
