"""A small 3-D convolutional network with a skip, as for volumes of medical images: a TARGET for recoup."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    """Convolution, InstanceNorm, leaky ReLU, twice."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(inputs, outputs, 3, padding=1)
        self.norm1 = nn.InstanceNorm3d(outputs, affine=True)
        self.conv2 = nn.Conv3d(outputs, outputs, 3, padding=1)
        self.norm2 = nn.InstanceNorm3d(outputs, affine=True)
        self.act = nn.LeakyReLU(0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [batch, inputs, depth, height, width] to [batch, outputs, depth, height, width]."""
        x = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(x)))


class VolumeNet(nn.Module):
    """Down, across, up, with one skip."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = Block(1, width)
        self.down = nn.Conv3d(width, 2 * width, 2, stride=2)
        self.middle = nn.Sequential(Block(2 * width, 2 * width), Block(2 * width, 2 * width))
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.last = Block(2 * width, width)
        self.head = nn.Conv3d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps volumes [batch, 1, side, side, side] to logits [batch, 2, side, side, side]."""
        skip = self.first(x)
        x = self.up(self.middle(self.down(skip)))
        return self.head(self.last(torch.cat([x, skip], dim=1)))


def target() -> dict[str, Any]:
    """Returns the model, two volumes, and a smooth loss on the logits."""
    return {
        "model": VolumeNet(),
        "batch": torch.randn(2, 1, 56, 56, 56, generator=torch.Generator().manual_seed(0)),
        "loss": lambda output, batch: nn.functional.softplus(output).mean(),
    }
