"""Small networks for the frontier benchmark that are neither in transformers nor in examples/."""

from __future__ import annotations

from typing import Any

import torch
from examples.resnet import ResNet
from examples.unet import UNet
from torch import nn


class Block3d(nn.Module):
    """Two 3-D convolutions, each with InstanceNorm and leaky ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(inputs, outputs, 3, padding=1),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.LeakyReLU(0.01),
            nn.Conv3d(outputs, outputs, 3, padding=1),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.LeakyReLU(0.01),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class UNet3d(nn.Module):
    """Encoder and decoder over volumes with a skip at every level."""

    def __init__(self, width: int = 8, levels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(levels)]
        self.down = nn.ModuleList(Block3d(a, b) for a, b in zip([1, *widths[:-1]], widths, strict=True))
        self.pool = nn.MaxPool3d(2)
        self.middle = Block3d(widths[-1], 2 * widths[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose3d(2 * w, w, 2, stride=2) for w in reversed(widths))
        self.up = nn.ModuleList(Block3d(2 * w, w) for w in reversed(widths))
        self.head = nn.Conv3d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.middle(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([grow(x), skips.pop()], dim=1))
        return self.head(x)


class Recurrent(nn.Module):
    """An LSTM cell in a loop over time, one call of it for each step."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[0], x.shape[2])
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return self.head(h)


class Experts(nn.Module):
    """Four experts, all of them weighted by a softmax gate (no routing by data), with a residual."""

    def __init__(self, width: int, num_experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        weights = self.gate(y).softmax(-1)
        for i, expert in enumerate(self.experts):
            x = x + weights[..., i : i + 1] * expert(y)
        return x


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _squares(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


def mlp_chain() -> dict[str, Any]:
    """16 x (Linear, LayerNorm, GELU) of width 256, batch 1024."""
    layers = (nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()) for _ in range(16))
    return {"model": nn.Sequential(*layers), "batch": _random(1024, 256), "loss": _squares}


def vgg() -> dict[str, Any]:
    """One flat nn.Sequential: convolutions, in-place ReLUs, pooling."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, count in ((32, 2), (64, 2), (128, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(128 * 8 * 8, 10)]
    return {"model": nn.Sequential(*layers), "batch": _random(8, 3, 64, 64), "loss": _squares}


def unet() -> dict[str, Any]:
    """The example's 2-D U-Net, width 16, on 64 x 64 images."""
    return {"model": UNet(width=16, levels=3), "batch": _random(8, 3, 64, 64), "loss": _squares}


def unet3d() -> dict[str, Any]:
    """A three-level 3-D U-Net on volumes of 32 x 32 x 32."""
    return {"model": UNet3d(), "batch": _random(2, 1, 32, 32, 32), "loss": _squares}


def resnet() -> dict[str, Any]:
    """The example's bottleneck ResNet with 2, 2, 2, 2 blocks on 112 x 112 images."""
    labels = torch.arange(8) % 10
    return {
        "model": ResNet(depths=(2, 2, 2, 2), classes=10),
        "batch": (_random(8, 3, 112, 112), labels),
        "loss": lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
    }


def lstm_loop() -> dict[str, Any]:
    """An LSTM cell called 24 times."""
    return {"model": Recurrent(), "batch": _random(64, 24, 192), "loss": _squares}


def experts() -> dict[str, Any]:
    """Six dense mixtures of four experts."""
    return {"model": nn.Sequential(*(Experts(128) for _ in range(6))), "batch": _random(8, 64, 128), "loss": _squares}
