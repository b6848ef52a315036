"""Models for the benchmarks that are in no package."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def mlp_chain() -> dict[str, Any]:
    """64 x (Linear, LayerNorm, GELU) of width 512, batch 1024."""
    layers = (nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU()) for _ in range(64))
    return {
        "model": nn.Sequential(*layers),
        "batch": torch.randn(1024, 512),
        "loss": lambda output, batch: output.square().mean(),
    }
