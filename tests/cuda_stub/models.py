"""Small models on the stub GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """A block of attention and a perceptron, with dropout, a mask, or neither."""

    def __init__(self, width: int = 128, heads: int = 2, *, dropout: float = 0.0, masked: bool = False) -> None:
        super().__init__()
        self.heads, self.dropout, self.masked = heads, dropout, masked
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril() if self.masked else None
        y = functional.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal=not self.masked)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(functional.dropout(x, self.dropout))


def transformer(*, layers: int = 3, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Sequential:
    """Returns blocks of attention on the GPU."""
    return nn.Sequential(*(Attention(**options) for _ in range(layers))).to("cuda", dtype)


def cnn() -> nn.Sequential:
    """Returns convolutions with BatchNorm."""
    sizes = [(3, 16), (16, 32), (32, 32)]
    blocks = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in sizes]
    return nn.Sequential(*blocks).cuda()


def perceptron() -> nn.Sequential:
    """Returns blocks whose saved tensors are worth moving."""
    blocks = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]
    return nn.Sequential(*blocks).cuda()


CASES: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], torch.Tensor]]] = {
    "float32": (transformer, lambda: torch.zeros(2, 64, 128, device="cuda")),
    "masked": (
        lambda: transformer(dtype=torch.bfloat16, masked=True),
        lambda: torch.zeros(2, 64, 128, device="cuda", dtype=torch.bfloat16),
    ),
    "flash": (
        lambda: transformer(dtype=torch.bfloat16),
        lambda: torch.zeros(2, 64, 128, device="cuda", dtype=torch.bfloat16),
    ),
    "dropout": (lambda: transformer(dropout=0.1), lambda: torch.zeros(2, 64, 128, device="cuda")),
    "cnn": (cnn, lambda: torch.zeros(4, 3, 32, 32, device="cuda")),
    "perceptron": (perceptron, lambda: torch.zeros(256, 512, device="cuda")),
}
