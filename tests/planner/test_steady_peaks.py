"""Steps of all kinds keep to what was predicted, the first ones and those that follow a program, with plain's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.evidence.gradients import equal_values
from recoup.evidence.memory import measure_peak, storage_bytes
from recoup.runtime.apply import apply_decisions
from recoup.thresholds import SAME_SHARE

ROWS, WIDTH, NUM_LAYERS, NUM_STEPS = 512, 32, 5, 5
Layer = Callable[["_Model", Tensor], Tensor]


class _Model(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lstm, self.norm = nn.LSTM(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(NUM_LAYERS):
            x = x + 0.1 * self.layer(self, x)
        return x.square().mean()


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / (1 + 10 * ctx.saved_tensors[0].abs()) ** 2


def _twice(x: Tensor) -> Tensor:
    return torch.tanh(torch.exp(x * 0.3))


def _plain(model: _Model, x: Tensor) -> Tensor:
    return _twice(_twice(model.first(x)))


def _spikes(model: _Model, x: Tensor) -> Tensor:
    potential = out = torch.zeros_like(x)
    for _ in range(3):
        potential = 0.9 * potential + model.norm(model.first(x))
        spikes = _Spike.apply(potential - 0.3)
        potential = potential * (1 - spikes.detach())
        out = out + model.second(spikes)
    return out


def _attention(model: _Model, x: Tensor) -> Tensor:
    q = _twice(model.first(x)).view(8, -1, WIDTH)
    return _twice((q @ _twice(q).mT).softmax(-1) @ q).view_as(x)


def _spectrum(model: _Model, x: Tensor) -> Tensor:
    return _twice(torch.fft.fftn(_twice(model.first(x)), dim=(0, 1)).real)


def _rotary(model: _Model, x: Tensor) -> Tensor:
    angles = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2).float())
    turned = torch.view_as_complex(_twice(model.first(x)).view(ROWS, -1, 2)) * angles
    return _twice(torch.view_as_real(turned).flatten(1))


def _graph(model: _Model, x: Tensor) -> Tensor:
    sources, targets = torch.arange(ROWS) * 7 % ROWS, torch.arange(ROWS) // 2
    messages = _twice(model.first(x))[sources]
    return _twice(torch.zeros_like(x).index_add_(0, targets, messages))


def _gumbel(model: _Model, x: Tensor) -> Tensor:
    return _twice(F.gumbel_softmax(model.first(x)) * model.second.bias)


def _lstm(model: _Model, x: Tensor) -> Tensor:
    out, _ = model.lstm(_twice(model.first(x)).view(8, -1, WIDTH))
    return _twice(out).view_as(x)


def _own_checkpoint(model: _Model, x: Tensor) -> Tensor:
    hidden = checkpoint(lambda z: _twice(model.first(z)), x, use_reentrant=False, preserve_rng_state=False)
    return _twice(model.second(hidden))


def _halves(model: _Model, x: Tensor) -> Tensor:
    y = _twice(model.first(x))
    out = torch.zeros_like(y)
    out[:, ::2] = y[:, ::2].sin()
    out[:, 1::2] = F.dropout(y[:, 1::2].cos(), 0.1)
    return _twice(model.second(out))


def _buckets(model: _Model, x: Tensor) -> Tensor:
    positions = torch.arange(ROWS // 4)
    apart = positions[None] - positions[:, None]
    buckets = (apart > 0).long() * WIDTH // 2  # as T5 has them: a square of indices, written over
    buckets += torch.where(apart.abs() < 8, apart.abs(), 8)
    bias = F.embedding(buckets, model.second.weight)[..., 0]
    return _twice(bias @ _twice(model.first(x)).view(ROWS // 4, -1)).view_as(x)


LAYERS = (_plain, _spikes, _attention, _spectrum, _rotary, _graph, _gumbel, _lstm, _own_checkpoint, _halves, _buckets)


def _train(layer: Layer, budget: str | None) -> tuple[list[Tensor], list[int], int]:
    torch.manual_seed(0)
    model, predicted_bytes = _Model(layer), 0
    decisions: Any = []
    if budget is not None:
        plan = recoup.plan(model, torch.randn(ROWS, WIDTH), budget=budget)
        decisions, predicted_bytes = plan.decisions, plan.predicted.peak_bytes
    found: list[Tensor] = []
    peaks = []
    with apply_decisions(model, decisions):
        for i in range(NUM_STEPS):
            torch.manual_seed(i)
            model.zero_grad()
            x = torch.randn(ROWS, WIDTH)

            def step(x: Tensor = x) -> None:
                loss = model(x)
                loss.backward()
                found.append(loss.detach())

            held_bytes = storage_bytes([*model.parameters(), *model.buffers(), x])
            peaks.append(measure_peak(step, device=torch.device("cpu"), held_bytes=held_bytes))
            found += [p.grad for p in model.parameters() if p.grad is not None]
            found += [buffer.clone() for buffer in model.buffers()]
    return found, peaks, predicted_bytes


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_every_step_keeps_to_its_prediction(layer: Layer) -> None:
    plain, _, _ = _train(layer, None)
    for budget in ("75%", "min"):
        planned, peaks, predicted_bytes = _train(layer, budget)
        assert len(plain) == len(planned)
        assert all(map(equal_values, plain, planned))
        assert max(peaks) <= predicted_bytes * (1 + SAME_SHARE), budget
        assert max(peaks[2:]) <= max(peaks[:2]), budget
