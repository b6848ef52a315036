"""Steps that write through views: their backward copies gradients where that of fake tensors hands them on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recoup
from recoup.evidence.memory import measure_peak, storage_bytes

CPU = torch.device("cpu")


def residual(x: Tensor, linear: nn.Linear) -> Tensor:
    return x + F.relu(linear(x), inplace=True)


def beside_another_view(x: Tensor, linear: nn.Linear) -> Tensor:
    h = linear(x)
    turned = h.transpose(1, 2)
    h.mul_(0.5)
    return x + turned.transpose(1, 2)


def turned(x: Tensor, linear: nn.Linear) -> Tensor:
    h = linear(x).transpose(1, 2)
    h *= 0.5
    return x + h.transpose(1, 2)


def heads(x: Tensor, linear: nn.Linear) -> Tensor:
    h = linear(x).view(*x.shape[:2], 4, -1).permute(0, 2, 1, 3)
    h.clamp_(-1.0, 1.0)
    return x + h.transpose(1, 2).flatten(2)


def slices(x: Tensor, linear: nn.Linear) -> Tensor:
    h = linear(x).clone()
    half = h[..., 8:]
    half += 1.0
    return x + h + half.repeat(1, 1, 2)[..., : x.shape[-1]]


def flat(x: Tensor, linear: nn.Linear) -> Tensor:
    h = linear(x).flatten()
    F.relu_(h)
    return x + h.view_as(x)


def seen_after(x: Tensor, linear: nn.Linear) -> Tensor:
    h = linear(x)
    F.relu_(h)
    return x + h.view(-1, x.shape[-1]).unflatten(0, x.shape[:2])


class Twice(nn.Module):
    def __init__(self, piece: Callable[[Tensor, nn.Linear], Tensor]) -> None:
        super().__init__()
        self.piece = piece
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.piece(x, layer)
        return self.head(x).mean()


@pytest.mark.parametrize("piece", [residual, beside_another_view, turned, heads, slices, flat, seen_after])
def test_peaks_of_steps_that_write_through_views(piece: Callable[[Tensor, nn.Linear], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Twice(piece), torch.randn(16, 64, 64)
    predicted = recoup.plan(model, x, budget="100%", actions=("rebuild",)).predicted.plain_peak_bytes
    model(x).backward()
    model.zero_grad()
    held_bytes = storage_bytes([*model.parameters(), x])
    measured = measure_peak(lambda: model(x).backward(), device=CPU, held_bytes=held_bytes)
    assert predicted == pytest.approx(measured, rel=0.005)
