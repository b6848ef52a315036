from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from recoup.errors import UsageError
from recoup.evidence.memory import measure_peak
from recoup.recurrent import checkpoint_timesteps
from tests.recurrent.helpers import Spike, differing


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.2)
        self.v: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.v = 0.9 * self.v + self.drop(self.norm(self.linear(x)))
        spikes = Spike.apply(self.v - 0.3)
        self.v = self.v - spikes
        return spikes + torch.sigmoid(self.v)


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.block, self.head = nn.Linear(5, 5), Block(), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encode(x)
        self.block.v = 0.0
        return self.head(torch.stack([self.block(x[t]) for t in range(len(x))]).mean(0))


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[1], 6)
        total = h
        for t in range(len(x)):
            h = self.cell(x[t], h)
            total = total + h
        return total


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.b(self.a(x))
        return x


def _train(network: nn.Module, num_rounds: int = 2) -> list[Any]:
    torch.manual_seed(1)
    x = torch.randn(13, 4, 5, generator=torch.Generator().manual_seed(2)).requires_grad_()
    for _ in range(num_rounds):
        network(x).square().sum().backward()
    return [x.grad, *(p.grad for p in network.parameters()), *network.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("chunk", [1, 4, 50])
@pytest.mark.parametrize("make", [Loop, Cell])
def test_exact_without_rewriting_the_loop(make: type[nn.Module], chunk: int) -> None:
    torch.manual_seed(0)
    network = make()
    plain = copy.deepcopy(network)
    handle = checkpoint_timesteps(network, chunk=chunk)
    copied = copy.deepcopy(network)
    expected = _train(plain)
    assert differing(expected, _train(network)) == []
    assert differing(expected, _train(copied)) == []
    keys = list(network.state_dict())
    handle.remove()
    assert keys == list(network.state_dict()) == list(plain.state_dict())
    assert all("forward" not in vars(m) for m in network.modules())


def test_keeps_less() -> None:
    def peak(chunk: int | None) -> int:
        torch.manual_seed(0)
        network = Loop()
        if chunk is not None:
            checkpoint_timesteps(network, chunk=chunk)
        x = torch.randn(60, 256, 5)
        return measure_peak(lambda: network(x).sum().backward(), device=torch.device("cpu"), held_bytes=0)

    assert peak(4) < 0.75 * peak(None)


def test_message_shows_the_scan() -> None:
    network = Two()
    with pytest.raises(UsageError, match=r"recoup\.recurrent\.scan\(step, inputs, None, chunk=3\)"):
        checkpoint_timesteps(network, chunk=3)
    assert all("forward" not in vars(m) for m in network.modules())
    checkpoint_timesteps(network, chunk=3, path="a").remove()
    with pytest.raises(UsageError, match="chunk"):
        checkpoint_timesteps(Loop(), chunk=0)
