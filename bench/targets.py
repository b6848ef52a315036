"""Models for the benchmarks that are in no package."""

from __future__ import annotations

from typing import Any

import torch
from examples.conv3d import VolumeNet
from examples.unet import UNet
from torch import nn


def mlp_chain() -> dict[str, Any]:
    """64 x (Linear, LayerNorm, GELU) of width 512, batch 1024."""
    layers = (nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU()) for _ in range(64))
    return {
        "model": nn.Sequential(*layers),
        "batch": torch.randn(1024, 512),
        "loss": lambda output, batch: output.square().mean(),
    }


class _Attention(nn.Module):
    """Causal self-attention with four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (t.view(batch, tokens, 4, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class _Experts(nn.Module):
    """Mixture of experts in which each expert chooses its tokens (arXiv 2202.09368): shapes do not depend on data."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.up = nn.Parameter(torch.randn(num_experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * width, width) / (2 * width) ** 0.5)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        num_experts = self.up.shape[0]
        gates, chosen = self.router(tokens).softmax(dim=-1).t().topk(2 * len(tokens) // num_experts, dim=1)
        mine = tokens[chosen.reshape(-1)].view(num_experts, -1, tokens.shape[1])
        done = self.act(mine @ self.up) @ self.down * gates[..., None]
        return torch.zeros_like(tokens).index_add(0, chosen.reshape(-1), done.reshape(-1, tokens.shape[1])).view_as(x)


class _MoeLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width)
        self.experts = _Experts(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.experts(self.norm2(x))


class _Moe(nn.Module):
    def __init__(self, width: int, num_layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_MoeLayer(width) for _ in range(num_layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def moe() -> dict[str, Any]:
    """A language model of 6 layers of width 256, each with 8 experts of which a token meets two on average."""
    return {
        "model": _Moe(256, 6, 1000),
        "batch": torch.randint(0, 1000, (4, 256)),
        "loss": lambda output, batch: nn.functional.cross_entropy(output.flatten(0, 1), batch.roll(-1, 1).flatten()),
    }


class _Steps(nn.Module):
    """Sixteen steps of a cell; the states of all of them."""

    def __init__(self, cell: nn.GRUCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = []
        for now in x.unbind(0):
            state = self.cell(now, state)
            states.append(state)
        return torch.stack(states), state


class _Gru(nn.Module):
    """A GRU unrolled over 256 steps, in sixteen calls of sixteen steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.steps = _Steps(nn.GRUCell(width, width))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[1], x.shape[2])
        outputs = []
        for chunk in x.chunk(16):
            out, state = self.steps(chunk, state)
            outputs.append(out)
        return self.head(torch.cat(outputs))


def gru() -> dict[str, Any]:
    """A GRU of width 192, batch 48, unrolled over 256 steps."""
    return {
        "model": _Gru(192),
        "batch": torch.randn(256, 48, 192),
        "loss": lambda output, batch: nn.functional.mse_loss(output, batch),
    }


def mlp_chain_small() -> dict[str, Any]:
    """64 x (Linear, LayerNorm, GELU) of width 256, batch 1024."""
    layers = (nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()) for _ in range(64))
    return {
        "model": nn.Sequential(*layers),
        "batch": torch.randn(1024, 256),
        "loss": lambda output, batch: output.square().mean(),
    }


def unet_small() -> dict[str, Any]:
    """The U-Net of the examples, on four noisy images of 96 x 96 pixels."""
    images = torch.randn(4, 3, 96, 96)
    return {"model": UNet(24), "batch": images, "loss": lambda output, batch: nn.functional.mse_loss(output, batch)}


def conv3d_small() -> dict[str, Any]:
    """The 3-D network of the examples, on two volumes of side 40."""
    return {
        "model": VolumeNet(),
        "batch": torch.randn(2, 1, 40, 40, 40),
        "loss": lambda output, batch: nn.functional.softplus(output).mean(),
    }
