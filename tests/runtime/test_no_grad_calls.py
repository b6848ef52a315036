"""Calls that run without gradients inside of a planned step: they have their numbers, as in the capture."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recoup

NUM_FREE, NUM_TRAINED = 3, 4


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, z: Tensor) -> Tensor:
        return z + self.down(F.gelu(self.up(z)))


class WarmedUp(nn.Module):
    """A fixed point that is approached without gradients first."""

    def __init__(self, num_free: int) -> None:
        super().__init__()
        self.num_free = num_free
        self.cell = Cell()
        self.mix = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        z = x
        with torch.no_grad():
            for _ in range(self.num_free):
                z = torch.tanh(self.cell(z) @ self.mix)
        for _ in range(NUM_TRAINED):
            z = torch.tanh(self.cell(z) @ self.mix)
        return z.pow(2).mean()


class Taught(nn.Module):
    """Layers beside those of a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cell() for _ in range(NUM_TRAINED))
        self.teacher = nn.ModuleList(Cell() for _ in range(NUM_TRAINED))
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        wanted = x
        for layer, teacher in zip(self.layers, self.teacher, strict=True):
            with torch.no_grad():
                wanted = torch.tanh(teacher(wanted))
            x = torch.tanh(layer(x))
        return (x - wanted).pow(2).mean()


@pytest.mark.parametrize("actions", [("rebuild",), ("recompute",)])
def test_calls_without_gradients_keep_no_plan_from_its_floor(actions: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 32)
    floors = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a step that its plan was not made for
        for num_free in (NUM_FREE, 0):
            floors.append(recoup.plan(WarmedUp(num_free), x, budget="min", actions=actions).predicted.peak_bytes)
    held_bytes = x.nbytes  # what the trained part starts from is no batch
    assert floors[0] <= 1.02 * floors[1] + held_bytes


@pytest.mark.parametrize("actions", [("rebuild",), ("recompute",)])
@pytest.mark.parametrize("model", [WarmedUp(NUM_FREE), Taught()], ids=["warmed up", "taught"])
def test_plans_with_calls_without_gradients_are_those_that_run(model: nn.Module, actions: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit = recoup.fit(model, torch.randn(512, 32), budget="60%", actions=actions, timed=False)
    with fit.applied:
        assert fit.evidence.gradients_equal
        assert fit.plan.predicted.peak_bytes == pytest.approx(fit.evidence.peak_bytes, rel=0.005)
