"""The neurons of snntorch, spikingjelly and norse as they come, where these are installed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recoup.recurrent import scan
from tests.recurrent.helpers import differing, plain

pytestmark = pytest.mark.slow

OPTIONS: list[dict[str, Any]] = [{"chunk": 4}, {"slots": 3}, {"budget": "70%"}, {"slots": 2, "rederive": True}]
X = torch.rand(15, 6, 12, generator=torch.Generator().manual_seed(8)) * 2


def _compare(network: nn.Module, step_of: Callable[[Any], Any], state_of: Callable[[Any], Any]) -> None:
    def train(options: dict[str, Any] | None) -> list[Any]:
        trained = copy.deepcopy(network)
        step, x = step_of(trained), X.clone().requires_grad_()
        torch.manual_seed(7)
        run = plain if options is None else lambda *args: scan(*args, **options)
        ys = run(step, x, state_of(trained))[1]
        (ys * torch.linspace(-1, 1, ys.numel()).view_as(ys)).sum().backward()
        buffers = [b.detach() for b in trained.buffers()]
        return [ys.detach(), x.grad, *(p.grad for p in trained.parameters()), *buffers, torch.get_rng_state()]

    expected = train(None)
    for options in OPTIONS:
        assert differing(expected, train(options)) == [], options


def test_snntorch_hidden() -> None:
    snn = pytest.importorskip("snntorch", reason="needs `pip install snntorch --no-deps`")
    network = nn.Sequential(
        nn.Linear(12, 16),
        snn.Leaky(beta=0.9, init_hidden=True, learn_beta=True),
        nn.Linear(16, 5),
        snn.Synaptic(alpha=0.8, beta=0.7, init_hidden=True),
    )
    _compare(network, lambda net: lambda state, x: (state, net(x)), lambda net: None)


def test_snntorch_explicit() -> None:
    snn = pytest.importorskip("snntorch", reason="needs `pip install snntorch --no-deps`")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 5)
            self.first, self.second = snn.Leaky(beta=0.9), snn.Leaky(beta=0.7, learn_threshold=True)

        def step(self, state: Any, x: torch.Tensor) -> Any:
            spikes, u = self.first(self.a(x), state[0])
            spikes, v = self.second(self.b(spikes), state[1])
            return (u, v), spikes

    _compare(Net(), lambda net: net.step, lambda net: (net.first.init_leaky(), net.second.init_leaky()))


def test_spikingjelly() -> None:
    neuron = pytest.importorskip(
        "spikingjelly.activation_based.neuron", reason="needs `pip install spikingjelly --no-deps` and loguru"
    )
    network = nn.Sequential(
        nn.Linear(12, 16),
        nn.BatchNorm1d(16),
        neuron.LIFNode(),
        nn.Dropout(0.2),
        nn.Linear(16, 5),
        neuron.ParametricLIFNode(),
    )
    _compare(network, lambda net: lambda state, x: (state, net(x)), lambda net: None)


def test_norse() -> None:
    norse = pytest.importorskip("norse.torch", reason="needs `pip install norse nirtorch --no-deps` and nir")
    network = norse.SequentialState(nn.Linear(12, 16), norse.LIFCell(), nn.Linear(16, 5), norse.LIFCell())
    _compare(network, lambda net: lambda state, x: net(x, state)[::-1], lambda net: None)
