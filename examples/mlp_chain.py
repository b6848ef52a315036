"""A chain of 64 MLP blocks of different widths: a TARGET for recoup."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH = 256


class Block(nn.Module):
    """LayerNorm, expand, GELU, contract."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(WIDTH, inner)
        self.act = nn.GELU()
        self.contract = nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [batch, WIDTH] to the same shape."""
        return self.contract(self.act(self.expand(self.norm(x))))


def target() -> dict[str, Any]:
    """Returns the chain (inner widths from 256 to 4096), a batch, and a mean squared error."""
    widths = [256, 512, 384, 1024, 256, 768, 2048, 4096]
    model = nn.Sequential(*(Block(widths[(5 * i) % len(widths)]) for i in range(64)))
    return {
        "model": model,
        "batch": torch.randn(1024, WIDTH, generator=torch.Generator().manual_seed(0)),
        "loss": lambda output, batch: nn.functional.mse_loss(output, batch),
    }
