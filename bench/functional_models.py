"""Models whose work lies outside of submodules, each as people write it and with `torch.utils.checkpoint` put by hand.

Each builder takes `wrap`: how a piece of the forward is called. `plainly` calls it; `checkpointed` puts
`torch.utils.checkpoint` around it, where somebody who knows the model would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Wrap = Callable[..., Any]


def plainly(piece: Callable[..., Any], *args: Any) -> Any:
    return piece(*args)


def checkpointed(piece: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(piece, *args, use_reentrant=False)


class Functional(nn.Module):
    """A model that calls pieces of its forward by `wrap`."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.wrap = wrap
        self.weights = nn.ParameterDict()

    def weight(self, name: str, *shape: int) -> None:
        fan_in = shape[-1] if len(shape) == 2 else max(1, shape[1] * 9) if len(shape) > 2 else shape[0]
        self.weights[name] = nn.Parameter(torch.randn(*shape) / fan_in**0.5)


class DilatedConvolutions(Functional):
    """Gated dilated convolutions with skips, as in WaveNet."""

    def __init__(self, wrap: Wrap, channels: int = 32, num_layers: int = 12) -> None:
        super().__init__(wrap)
        self.first = nn.Conv1d(1, channels, 1)
        self.filters = nn.ModuleList(nn.Conv1d(channels, channels, 2, dilation=2 ** (i % 6)) for i in range(num_layers))
        self.gates = nn.ModuleList(nn.Conv1d(channels, channels, 2, dilation=2 ** (i % 6)) for i in range(num_layers))
        self.last = nn.Conv1d(channels, 1, 1)

    def layer(self, x: Tensor, skip: Tensor, i: int) -> tuple[Tensor, Tensor]:
        padded = F.pad(x, (2 ** (i % 6), 0))
        gated = torch.tanh(self.filters[i](padded)) * torch.sigmoid(self.gates[i](padded))
        return x + gated, skip + gated

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skip = torch.zeros_like(x)
        for i in range(len(self.filters)):
            x, skip = self.wrap(self.layer, x, skip, i)
        return self.last(F.relu(skip))


class ParameterTransformer(Functional):
    """A transformer of parameters and functions."""

    def __init__(self, wrap: Wrap, width: int = 128, num_layers: int = 8, heads: int = 4) -> None:
        super().__init__(wrap)
        self.num_layers, self.heads = num_layers, heads
        for i in range(num_layers):
            self.weight(f"qkv{i}", 3 * width, width)
            self.weight(f"out{i}", width, width)
            self.weight(f"up{i}", 4 * width, width)
            self.weight(f"down{i}", width, 4 * width)

    def layer(self, x: Tensor, i: int) -> Tensor:
        batch, length, width = x.shape
        y = F.layer_norm(x, (width,))
        qkv = F.linear(y, self.weights[f"qkv{i}"]).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.linear(mixed, self.weights[f"out{i}"])
        y = F.layer_norm(x, (width,))
        return x + F.linear(F.gelu(F.linear(y, self.weights[f"up{i}"])), self.weights[f"down{i}"])

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.num_layers):
            x = self.wrap(self.layer, x, i)
        return x


class MessagePassing(Functional):
    """A graph network with gathers and `index_add`."""

    def __init__(self, wrap: Wrap, width: int = 32, num_layers: int = 6) -> None:
        super().__init__(wrap)
        self.num_layers = num_layers
        for i in range(num_layers):
            self.weight(f"edge{i}", width, 2 * width)
            self.weight(f"node{i}", width, 2 * width)

    def layer(self, x: Tensor, source: Tensor, target: Tensor, i: int) -> Tensor:
        messages = F.silu(F.linear(torch.cat([x[source], x[target]], -1), self.weights[f"edge{i}"]))
        received = torch.zeros_like(x).index_add(0, target, messages)
        return x + F.silu(F.linear(torch.cat([x, received], -1), self.weights[f"node{i}"]))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for i in range(self.num_layers):
            x = self.wrap(self.layer, x, source, target, i)
        return x


class FunctionalUNet(Functional):
    """A U-Net of functions: group norm, SiLU and convolutions, skips by concatenation."""

    def __init__(self, wrap: Wrap, width: int = 16, levels: int = 3) -> None:
        super().__init__(wrap)
        self.levels = levels
        widths = [width * 2**i for i in range(levels + 1)]
        self.weight("first", width, 3, 3, 3)
        for i in range(levels):
            self.weight(f"down{i}a", widths[i], widths[i], 3, 3)
            self.weight(f"down{i}b", widths[i + 1], widths[i], 3, 3)
            self.weight(f"up{i}a", widths[i], widths[i + 1] + widths[i + 1], 3, 3)
            self.weight(f"up{i}b", widths[i], widths[i], 3, 3)
        self.weight("middlea", widths[-1], widths[-1], 3, 3)
        self.weight("middleb", widths[-1], widths[-1], 3, 3)
        self.weight("last", 3, width, 3, 3)

    def block(self, x: Tensor, name: str) -> Tensor:
        for half in "ab":
            x = F.conv2d(F.silu(F.group_norm(x, 4)), self.weights[f"{name}{half}"], padding=1)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weights["first"], padding=1)
        skips = []
        for i in range(self.levels):
            x = self.wrap(self.block, x, f"down{i}")
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.wrap(self.block, x, "middle")
        for i in reversed(range(self.levels)):
            x = torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1)
            x = self.wrap(self.block, x, f"up{i}")
        return F.conv2d(x, self.weights["last"], padding=1)


class OdeSteps(Functional):
    """Runge-Kutta steps of a small network inside one forward."""

    def __init__(self, wrap: Wrap, width: int = 64, num_steps: int = 16) -> None:
        super().__init__(wrap)
        self.num_steps = num_steps
        self.weight("up", 4 * width, width)
        self.weight("down", width, 4 * width)

    def field(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weights["up"])), self.weights["down"])

    def step(self, x: Tensor) -> Tensor:
        h = 1.0 / self.num_steps
        k1 = self.field(x)
        k2 = self.field(x + h / 2 * k1)
        k3 = self.field(x + h / 2 * k2)
        k4 = self.field(x + h * k3)
        return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_steps):
            x = self.wrap(self.step, x)
        return x


class DenseConnections(Functional):
    """Each layer reads all earlier ones, concatenated, as in DenseNet."""

    def __init__(self, wrap: Wrap, growth: int = 16, num_layers: int = 12) -> None:
        super().__init__(wrap)
        self.first = nn.Conv2d(3, 2 * growth, 3, padding=1)
        widths = [2 * growth + i * growth for i in range(num_layers)]
        self.norms = nn.ModuleList(nn.BatchNorm2d(w) for w in widths)
        self.convolutions = nn.ModuleList(nn.Conv2d(w, growth, 3, padding=1) for w in widths)

    def normalised(self, i: int, *earlier: Tensor) -> Tensor:
        return F.relu(self.norms[i](torch.cat(earlier, 1)))

    def forward(self, x: Tensor) -> Tensor:
        found = [self.first(x)]
        for i, convolution in enumerate(self.convolutions):
            found.append(convolution(self.wrap(self.normalised, i, *found)))
        return torch.cat(found, 1)


class RadianceField(Functional):
    """An MLP over samples of rays, composited by cumulative products."""

    def __init__(self, wrap: Wrap, width: int = 64, num_layers: int = 6) -> None:
        super().__init__(wrap)
        self.num_layers, self.width = num_layers, width
        self.weight("first", width, 39)
        for i in range(num_layers):
            self.weight(f"layer{i}", width, width + (39 if i == 3 else 0))
        self.weight("last", 4, width)

    def trunk(self, points: Tensor) -> Tensor:
        scales = 2.0 ** torch.arange(6)
        angles = (points.unsqueeze(-1) * scales).flatten(-2)
        encoded = torch.cat([points, torch.sin(angles), torch.cos(angles)], -1)
        x = F.relu(F.linear(encoded, self.weights["first"]))
        for i in range(self.num_layers):
            x = torch.cat([x, encoded], -1) if i == 3 else x
            x = F.relu(F.linear(x, self.weights[f"layer{i}"]))
        return F.linear(x, self.weights["last"])

    def composite(self, raw: Tensor) -> Tensor:
        opacity = 1 - torch.exp(-F.softplus(raw[..., 3]) * 0.1)
        left = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity + 1e-6], -1), -1)[:, :-1]
        return ((opacity * left).unsqueeze(-1) * torch.sigmoid(raw[..., :3])).sum(1)

    def forward(self, points: Tensor) -> Tensor:
        pieces = [self.wrap(lambda p: self.composite(self.trunk(p)), piece) for piece in points.split(64)]
        return torch.cat(pieces)


class DiffusionTransformer(Functional):
    """Blocks of functions, modulated by the time step: adaptive layer norm, attention, MLP."""

    def __init__(self, wrap: Wrap, width: int = 96, num_layers: int = 8, heads: int = 4) -> None:
        super().__init__(wrap)
        self.num_layers, self.heads = num_layers, heads
        for i in range(num_layers):
            self.weight(f"modulation{i}", 6 * width, width)
            self.weight(f"qkv{i}", 3 * width, width)
            self.weight(f"out{i}", width, width)
            self.weight(f"up{i}", 4 * width, width)
            self.weight(f"down{i}", width, 4 * width)

    def block(self, x: Tensor, time: Tensor, i: int) -> Tensor:
        batch, length, width = x.shape
        shifts = F.linear(F.silu(time), self.weights[f"modulation{i}"]).unsqueeze(1).chunk(6, -1)
        y = F.layer_norm(x, (width,)) * (1 + shifts[1]) + shifts[0]
        qkv = F.linear(y, self.weights[f"qkv{i}"]).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + shifts[2] * F.linear(mixed, self.weights[f"out{i}"])
        y = F.layer_norm(x, (width,)) * (1 + shifts[4]) + shifts[3]
        y = F.gelu(F.linear(y, self.weights[f"up{i}"]), approximate="tanh")
        return x + shifts[5] * F.linear(y, self.weights[f"down{i}"])

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        for i in range(self.num_layers):
            x = self.wrap(self.block, x, time, i)
        return x


@dataclasses.dataclass(frozen=True)
class FunctionalModel:
    """A model by its class, and a batch for it."""

    kind: type[Functional]
    batch: Callable[[], tuple[Tensor, ...]]

    def make(self, wrap: Wrap = plainly) -> Functional:
        torch.manual_seed(0)
        return self.kind(wrap)


def _graph() -> tuple[Tensor, ...]:
    return torch.randn(2000, 32), torch.randint(0, 2000, (20000,)), torch.randint(0, 2000, (20000,))


FUNCTIONAL: dict[str, FunctionalModel] = {
    "dilated convolutions": FunctionalModel(DilatedConvolutions, lambda: (torch.randn(4, 1, 8192),)),
    "parameter transformer": FunctionalModel(ParameterTransformer, lambda: (torch.randn(4, 256, 128),)),
    "message passing": FunctionalModel(MessagePassing, _graph),
    "functional U-Net": FunctionalModel(FunctionalUNet, lambda: (torch.randn(2, 3, 96, 96),)),
    "ODE steps": FunctionalModel(OdeSteps, lambda: (torch.randn(512, 64),)),
    "dense connections": FunctionalModel(DenseConnections, lambda: (torch.randn(4, 3, 48, 48),)),
    "radiance field": FunctionalModel(RadianceField, lambda: (torch.rand(512, 48, 3),)),
    "diffusion transformer": FunctionalModel(
        DiffusionTransformer, lambda: (torch.randn(4, 256, 96), torch.randn(4, 96))
    ),
}
