"""A 2-D U-Net with GroupNorm and SiLU, skips joined by concatenation: a TARGET for recoup."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    """Two convolutions, each with GroupNorm and SiLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(8, outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(8, outputs),
            nn.SiLU(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [batch, inputs, height, width] to [batch, outputs, height, width]."""
        return self.body(x)


class UNet(nn.Module):
    """Encoder and decoder with a skip at every level."""

    def __init__(self, width: int = 32, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(levels)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Block(a, b) for a, b in zip([width, *widths[:-1]], widths, strict=True))
        self.pool = nn.MaxPool2d(2)
        self.middle = Block(widths[-1], widths[-1])
        self.up = nn.ModuleList(Block(2 * b, a) for a, b in zip([width, *widths[:-1]], widths, strict=True))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [batch, 3, height, width] to the same shape; sides divisible by 2**levels."""
        x = self.stem(x)
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.middle(x)
        for block in reversed(self.up):
            x = nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1))
        return self.head(x)


def target() -> dict[str, Any]:
    """Returns the model, a batch of noisy images, and a mean squared error against them."""
    images = torch.randn(8, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    return {
        "model": UNet(),
        "batch": images,
        "loss": lambda output, batch: nn.functional.mse_loss(output, batch),
    }
