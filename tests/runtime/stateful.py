"""Models that change something besides parameters in their forward, each with the modules that may be regions."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

WIDTH = 16
BATCH = 256


class Tower(nn.Module):
    """Blocks in a row between a stem and a head; a scalar out."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Mlp(nn.Module):
    """Two layers around an activation; a place for state."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.plain_average = nn.BatchNorm2d(4, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x))) + self.plain_average(x)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ConvBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class SpectralBlock(Mlp):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.up)
        with _old_names():
            nn.utils.spectral_norm(self.down)


class WeightNormBlock(Mlp):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.up)
        with _old_names():
            nn.utils.weight_norm(self.down)


@contextlib.contextmanager
def _old_names() -> Iterator[None]:
    """The forms of weight and spectral norm that work by hooks are deprecated, and in use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Neuron(nn.Module):
    """Leaky integrate-and-fire with a soft spike; the potential is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.v: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.v = 0.9 * self.v + torch.tanh(self.fc(x))
        spike = torch.sigmoid(4 * (self.v - 0.5))
        self.v = self.v * (1 - spike)
        return spike


class SpikingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Neuron()
        self.second = Neuron()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for neuron in (self.first, self.second):  # the graph ends at the step; the potential goes on
            neuron.v = neuron.v.detach() if isinstance(neuron.v, torch.Tensor) else neuron.v
        spikes = [self.second(self.first(x * t)) for t in (0.5, 1.0, 1.5)]
        return self.head(torch.stack(spikes).mean(0)).square().mean()


class HiddenState(nn.Module):
    """A GRU cell that keeps its hidden state from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = None if self.hidden is None else self.hidden.detach()
        for _ in range(3):
            hidden = self.cell(x, hidden)
        self.hidden = hidden
        return x + hidden


class Experts(nn.Module):
    """Top-1 routing with load counters: a buffer changed in place, a list, an int."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Mlp() for _ in range(3))
        self.register_buffer("load", torch.zeros(3))
        self.calls = 0
        self.history: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.router(x) - 0.01 * self.load).softmax(-1)
        chosen = weights.argmax(-1)
        self.load += torch.bincount(chosen, minlength=3)
        self.calls += 1
        self.history.append(self.calls)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            at = (chosen == i).nonzero().flatten()
            out = out.index_add(0, at, expert(x[at]) * weights[at, i, None])
        return x + out


class Average(Mlp):
    """An exponential mean of its activations, in a buffer and in a tensor attribute, used at once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.peak = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        torch.maximum(self.peak, x.detach().amax(0), out=self.peak)
        return super().forward(x - self.mean) / (1 + self.peak)


class Queue(Mlp):
    """The queue of keys of momentum contrast: written at a pointer, read as negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(WIDTH, 4 * BATCH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x) @ self.queue.clone()
        at = int(self.pointer)
        self.queue[:, at : at + BATCH] = nn.functional.normalize(x.detach(), dim=1).T
        self.pointer[0] = (at + BATCH) % (4 * BATCH)
        return x + logits.softmax(-1) @ self.queue.clone().T


class RandomDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if random.random() < 0.7:
                x = layer(x)
        return x


class NumpyMask(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.from_numpy(np.random.rand(*x.shape) < 0.8)
        return super().forward(x * mask)


class Cached(nn.Module):
    """A language model with its key-value cache left on."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            num_hidden_layers=2, hidden_size=16, intermediate_size=64, num_attention_heads=2, vocab_size=32
        )
        assert config.use_cache
        self.lm = LlamaForCausalLM(config).train()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm(input_ids=ids, labels=ids).loss


def vectors(i: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(i))


def images(i: int) -> torch.Tensor:
    return torch.randn(4, 4, 16, 16, generator=torch.Generator().manual_seed(i))


def tokens(i: int) -> torch.Tensor:
    return torch.randint(0, 32, (2, 24), generator=torch.Generator().manual_seed(i))


Make = Callable[[], nn.Module]
_BLOCKS = ("blocks.0", "blocks.1", "blocks.2")

STATEFUL: dict[str, tuple[Make, Callable[[int], torch.Tensor], tuple[str, ...]]] = {
    "batch norm": (ConvNet, images, _BLOCKS),
    "spectral norm": (lambda: Tower(*(SpectralBlock() for _ in range(3))), vectors, _BLOCKS),
    "weight norm": (lambda: Tower(*(WeightNormBlock() for _ in range(3))), vectors, _BLOCKS),
    "membrane potential": (SpikingNet, vectors, ("first", "second")),
    "hidden state": (lambda: Tower(*(HiddenState() for _ in range(3))), vectors, _BLOCKS),
    "load counters": (lambda: Tower(*(Experts() for _ in range(3))), vectors, _BLOCKS),
    "key-value cache": (Cached, tokens, ("lm.model.layers.0", "lm.model.layers.1")),
    "exponential mean": (lambda: Tower(*(Average() for _ in range(3))), vectors, _BLOCKS),
    "queue of keys": (lambda: Tower(*(Queue() for _ in range(3))), vectors, _BLOCKS),
    "random depth": (lambda: Tower(*(RandomDepth() for _ in range(3))), vectors, _BLOCKS),
    "numpy mask": (lambda: Tower(*(NumpyMask() for _ in range(3))), vectors, _BLOCKS),
}
"""name -> model, i-th batch, modules to make regions. (Synchronised batch norm needs two processes: its own test.)"""


def everything(model: nn.Module) -> dict[str, Any]:
    """Returns all that training leaves in a model: parameters, gradients, buffers, attributes, random streams."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key not in ("_parameters", "_buffers", "_modules", "forward") and "hook" not in key:
                found[f"{path}.{key}"] = value
        for name, parameter in module._parameters.items():
            found[f"{path}.{name}"] = parameter
            found[f"{path}.{name}.grad"] = None if parameter is None else parameter.grad
        for name, buffer in module._buffers.items():
            found[f"{path}.{name}"] = buffer
    found |= {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()[1:3]}
    return {name: _taken(value) for name, value in found.items()}


def _taken(value: Any) -> Any:
    """Returns a value as it is now, whatever is done to the original later."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, (list, tuple)):
        return type(value)([_taken(v) for v in value])
    return dict(value) if type(value) is dict else value


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Returns the names of what is not bit-equal."""
    return [k for k in sorted(a.keys() | b.keys()) if k not in a or k not in b or not _same(a[k], b[k])]


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (int, float, str, bool, type(None), dict, set)):
        return bool(a == b)
    return True  # configurations, functions: the same object in kind


def seeded(make: Make) -> nn.Module:
    """Returns a new model, the same at every call, with every random stream at the same place."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return make()


def train(model: nn.Module, batch: Callable[[int], torch.Tensor], num_steps: int = 5) -> dict[str, Any]:
    """Runs some steps, one forward without a backward among them, and returns `everything`."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for i in range(num_steps):
        optimizer.zero_grad()
        if i == 2:
            model(batch(100))
        model(batch(i)).backward()
        optimizer.step()
    return everything(model)
