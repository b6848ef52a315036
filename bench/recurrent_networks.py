"""The networks of `bench.recurrent_peers`: spikingjelly's, snntorch's, two gated cells and a state space."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def _nothing() -> None:
    return None


@dataclasses.dataclass(slots=True, kw_only=True)
class Network:
    """A loop over time.

    Attributes:
        module: with the parameters. inputs: time first. step: `state, y = step(state, x)`. start: makes the first
            state. restart: forgets what modules keep between sequences. read, write: that state, for those who hand it
            through by hand. layers: makes the same network as a sequence of blocks that take all of time at once, None
            where there is no such form.
    """

    module: nn.Module
    inputs: torch.Tensor
    step: Callable[[Any, torch.Tensor], tuple[Any, torch.Tensor]]
    start: Callable[[], Any] = _nothing
    restart: Callable[[], None] = _nothing
    read: Callable[[], Any] = _nothing
    write: Callable[[Any], None] = lambda state: None
    layers: Callable[[], nn.Sequential] | None = None


def _of_spikingjelly(module: nn.Sequential, inputs: torch.Tensor) -> Network:
    """A sequence of blocks of spikingjelly's layers."""
    from spikingjelly.activation_based import base, functional

    functional.set_step_mode(module, "s")
    functional.reset_net(module)

    def copied() -> nn.Sequential:
        functional.reset_net(module)
        return copy.deepcopy(module)

    return Network(
        module=module,
        inputs=inputs,
        step=lambda state, x: (state, module(x)),
        restart=lambda: functional.reset_net(module),
        read=lambda: list(base.extract_memories(module)),
        write=lambda state: base.load_memories(module, list(state)),
        layers=copied,
    )


class _Block(nn.Sequential):
    """What memopt is told to checkpoint as one."""


def mnist_net() -> Network:
    """spikingjelly's MNISTNet with 12 channels (its own 128), its layers grouped into blocks that end in a neuron."""
    from spikingjelly.activation_based import neuron, surrogate
    from spikingjelly.activation_based.model.parametric_lif_net import MNISTNet

    whole = MNISTNet(12, neuron.LIFNode, surrogate_function=surrogate.ATan(), detach_reset=True).conv_fc
    blocks, block = [], []
    for module in whole:
        block.append(module)
        if isinstance(module, neuron.BaseNode):
            blocks.append(_Block(*block))
            block = []
    return _of_spikingjelly(nn.Sequential(*blocks, _Block(*block)), torch.rand(64, 16, 1, 28, 28))


def dvs_vgg() -> Network:
    """The VGG of spikingjelly's own memopt example with an eighth of its channels."""
    from spikingjelly.activation_based import layer, surrogate
    from spikingjelly.activation_based.examples.memopt.models import VGGBlock

    options = {
        "tau": 1.333,
        "decay_input": False,
        "detach_reset": True,
        "surrogate_function": surrogate.ATan(),
        "step_mode": "m",
    }
    sizes = (2, 8, 16, 32, 32, 64, 64, 64, 64)
    pooled = (2, 4, 6)
    blocks = [VGGBlock(a, b, 3, 1, 1, i in pooled, **options) for i, (a, b) in enumerate(itertools.pairwise(sizes))]
    head = nn.Sequential(layer.AvgPool2d(2), layer.Flatten(), layer.Linear(64 * 9, 10))
    return _of_spikingjelly(nn.Sequential(*blocks, head), torch.rand(32, 4, 2, 48, 48))


class _Convolutional(nn.Module):
    """snntorch's tutorial network: two convolutions with Leaky neurons, then a linear readout with one."""

    def __init__(self) -> None:
        super().__init__()
        import snntorch

        self.conv1, self.conv2 = nn.Conv2d(1, 12, 5), nn.Conv2d(12, 32, 5)
        self.fc = nn.Linear(32 * 16, 10)
        self.lif1, self.lif2, self.lif3 = (snntorch.Leaky(beta=0.9) for _ in range(3))

    def step(self, state: Any, x: torch.Tensor) -> Any:
        mem1, mem2, mem3 = state
        spikes, mem1 = self.lif1(torch.nn.functional.max_pool2d(self.conv1(x), 2), mem1)
        spikes, mem2 = self.lif2(torch.nn.functional.max_pool2d(self.conv2(spikes), 2), mem2)
        spikes, mem3 = self.lif3(self.fc(spikes.flatten(1)), mem3)
        return (mem1, mem2, mem3), mem3


def snntorch_conv() -> Network:
    """The convolutional network of snntorch's tutorials at batch 16."""
    module = _Convolutional()

    def start() -> Any:
        return torch.zeros(16, 12, 12, 12), torch.zeros(16, 32, 4, 4), torch.zeros(16, 10)

    def restart() -> None:
        for neuron in (module.lif1, module.lif2, module.lif3):
            neuron.reset_mem()

    return Network(module=module, inputs=torch.rand(64, 16, 1, 28, 28), step=module.step, start=start, restart=restart)


class _Gated(nn.Module):
    """Two layers of a cell and a readout."""

    def __init__(self, cell: type[nn.Module], size: int) -> None:
        super().__init__()
        self.first, self.second = cell(64, size), cell(size, size)
        self.readout = nn.Linear(size, 10)

    def step(self, state: Any, x: torch.Tensor) -> Any:
        first, second = state
        first = self.first(x, first)
        second = self.second(first[0] if isinstance(first, tuple) else first, second)
        return (first, second), self.readout(second[0] if isinstance(second, tuple) else second)


def gru() -> Network:
    """Two layers of `nn.GRUCell`, 128 wide."""
    module = _Gated(nn.GRUCell, 128)
    inputs = torch.randn(128, 128, 64)
    return Network(
        module=module, inputs=inputs, step=module.step, start=lambda: (torch.zeros(128, 128), torch.zeros(128, 128))
    )


def lstm() -> Network:
    """Two layers of `nn.LSTMCell`, 128 wide."""
    module = _Gated(nn.LSTMCell, 128)
    inputs = torch.randn(128, 128, 64)

    def start() -> Any:
        return tuple((torch.zeros(128, 128), torch.zeros(128, 128)) for _ in range(2))

    return Network(module=module, inputs=inputs, step=module.step, start=start)


class _StateSpace(nn.Module):
    """Two gated layers with diagonal state spaces and a norm each, in the manner of S4D and Mamba's gate."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(32, width), nn.Linear(width, 10)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.decay = nn.Parameter(torch.rand(2, width, size))
        self.into = nn.Parameter(torch.randn(2, width, size) / size)
        self.out = nn.Parameter(torch.randn(2, width, size) / size)

    def step(self, state: Any, x: torch.Tensor) -> Any:
        y, states = self.enter(x), []
        for i, (norm, gate) in enumerate(zip(self.norms, self.gates, strict=True)):
            u = norm(y)
            h = torch.exp(-self.decay[i]) * state[i] + self.into[i] * u.unsqueeze(-1)
            y = y + (h * self.out[i]).sum(-1) * nn.functional.silu(gate(u))
            states.append(h)
        return tuple(states), self.leave(y)


def state_space() -> Network:
    """Two state-space layers, 64 wide, 8 states a channel."""
    module = _StateSpace(64, 8)
    return Network(
        module=module,
        inputs=torch.randn(128, 32, 32),
        step=module.step,
        start=lambda: tuple(torch.zeros(32, 64, 8) for _ in range(2)),
    )


NETWORKS: dict[str, Callable[[], Network]] = {
    "spikingjelly MNISTNet": mnist_net,
    "spikingjelly VGG": dvs_vgg,
    "snntorch convolutional": snntorch_conv,
    "GRU": gru,
    "LSTM": lstm,
    "state space": state_space,
}
