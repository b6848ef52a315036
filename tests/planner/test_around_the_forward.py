"""Plans by tensor of steps that run something before the planned forward of the model, or between two of them."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recoup
from recoup.capture.step import StepFunction


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))

    def forward(self, x: Tensor, guess: Tensor) -> Tensor:
        h = self.first(torch.cat([x, guess], dim=-1))
        for layer in self.layers:
            h = torch.tanh(h + layer(h))
        return h


def _noisy(x: Tensor) -> Tensor:
    share = torch.rand(len(x), 1)
    return x * share + torch.randn_like(x) * (1 - share)


def diffusion(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(_noisy(x), torch.zeros_like(x)), x)


def own_guess(model: nn.Module, x: Tensor) -> Tensor:
    noisy = _noisy(x)
    with torch.no_grad():
        guess = model(noisy, torch.zeros_like(x))
    return F.mse_loss(model(noisy, guess), x)


def scaled_in_place(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(_noisy(x).mul_(0.5), x.new_zeros(x.shape)), x)


def two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x, x), model(_noisy(x), x))


@pytest.mark.parametrize("step", [diffusion, own_guess, scaled_in_place, two_forwards])
def test_what_runs_around_the_forward_is_no_hindrance(step: StepFunction) -> None:
    torch.manual_seed(0)
    model, x = Denoiser(), torch.randn(512, 32)
    floor = recoup.plan(model, x, step=step, budget="min", actions=("rebuild",)).predicted
    assert floor.peak_bytes < 0.55 * floor.plain_peak_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a step that its plan was not made for
        fit = recoup.fit(model, x, step=step, budget="70%", actions=("rebuild",), timed=False)
    with fit.applied:
        assert fit.evidence.gradients_equal
        assert fit.plan.predicted.peak_bytes == pytest.approx(fit.evidence.peak_bytes, rel=0.005)
