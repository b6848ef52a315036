"""Models that are small enough to be compiled in a test."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Residual(nn.Module):
    """Blocks of LayerNorm, Linear, GELU around a residual stream; `dropout` as given."""

    def __init__(self, num_blocks: int = 4, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(num_blocks))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(num_blocks))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(num_blocks))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the mean square of the stream's end."""
        for norm, wide, narrow in zip(self.norms, self.wide, self.narrow, strict=True):
            x = x + self.dropout(narrow(nn.functional.gelu(wide(norm(x)))))
        return x.square().mean()


class Blocks(nn.Module):
    """Residual blocks, the stream scaled by eager code between them."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(num_blocks=1) for _ in range(num_blocks))
        for block in self.blocks:
            block.forward = self._stream(block)  # type: ignore[method-assign]

    @staticmethod
    def _stream(block: Any) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            y = block.wide[0](block.norms[0](x))
            return x + block.narrow[0](nn.functional.gelu(y))  # type: ignore[no-any-return]

        return forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the mean square of the stream's end."""
        for block in self.blocks:
            x = block(x) * 0.5
        return x.square().mean()


class Gated(nn.Module):
    """Blocks of a gate written out element by element, then normalised: torch saves part of what backward computes."""

    def __init__(self, num_blocks: int = 3, width: int = 32) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(num_blocks))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the mean square of the stream's end."""
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            y = wide(x)
            y = 0.5 * y * (1.0 + torch.tanh(0.8 * (y + 0.04 * y.pow(3))))
            x = x + nn.functional.normalize(narrow(y), dim=-1)
        return x.square().mean()
