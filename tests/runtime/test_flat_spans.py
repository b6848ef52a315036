"""Plans for flat chains: spans over calls that could not be regions of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import recoup
from recoup.cost.model import FlopsCost


def chain(activation: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [(nn.Linear(32, 32), activation(), nn.Identity()) for _ in range(12)]
    return nn.Sequential(*(module for layer in layers for module in layer))


def convolutions(activation: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(6):
        layers += [nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), activation(), nn.Dropout2d(0.1)]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 36, 10))


@pytest.mark.slow
@pytest.mark.parametrize("make", [chain, convolutions])
@pytest.mark.parametrize("activation", [nn.ReLU, lambda: nn.ReLU(inplace=True), nn.Tanh])
def test_a_flat_chain_fits_into_less(
    make: Callable[[Callable[[], nn.Module]], nn.Sequential], activation: Callable[[], nn.Module]
) -> None:
    model = make(activation)
    batch = torch.randn(256, 32) if make is chain else torch.randn(8, 3, 12, 12)
    curve = recoup.frontier(model, batch, num_points=4)
    least, plain = curve.points[0], curve.points[-1]
    assert least.peak_bytes < 0.8 * plain.peak_bytes
    if make is chain:
        spans = recoup.frontier(model, batch, actions=("recompute",), cost=FlopsCost(), num_points=3)
        assert any(d.span for point in spans.points for d in point.plan.regions)
    for point in curve.points[:-1]:
        evidence = recoup.verify(model, point.plan, batch)
        assert evidence.ok and evidence.exact
        assert evidence.peak_bytes <= point.peak_bytes
