"""SDPA keeps no attention matrix: recomputing attention for one would free nothing of that size."""

from __future__ import annotations

import torch
from torch import nn

from recoup.selective import MemoryProfiler


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])


def _activation_bytes(tokens: int) -> int:
    return MemoryProfiler(_Attention()).profile(torch.zeros(1, tokens, 16), 1).total_activation_bytes


def test_attention_saves_no_matrix() -> None:
    small, large = _activation_bytes(256), _activation_bytes(1024)
    assert large == 4 * small  # linear in the tokens
    assert large < 1024 * 1024 * 4  # one matrix of one head
