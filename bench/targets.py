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


def unet_tiny() -> dict[str, Any]:
    """A U-Net of two levels of width 16, eight images of 32 x 32."""
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return {
        "model": UNet(width=16, levels=2),
        "batch": images,
        "loss": lambda output, batch: nn.functional.mse_loss(output, batch),
    }


def resnet_tiny() -> dict[str, Any]:
    """A ResNet of transformers: three stages of bottlenecks, eight images of 64 x 64."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 128], depths=[2, 3, 2], num_labels=10)
    generator = torch.Generator().manual_seed(0)
    batch = {
        "pixel_values": torch.randn(8, 3, 64, 64, generator=generator),
        "labels": torch.randint(0, 10, (8,), generator=generator),
    }
    return {"model": ResNetForImageClassification(config), "batch": batch}


def _squares(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


class _MixerLayer(nn.Module):
    """Token mixing and channel mixing (arXiv 2105.01601)."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.over_channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.over_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norm2(x))


class _Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mixer_tiny() -> dict[str, Any]:
    """An MLP-Mixer of four layers: 64 tokens of width 64, batch 8."""
    return {
        "model": _Layers(*(_MixerLayer(64, 64) for _ in range(4))),
        "batch": torch.randn(8, 64, 64),
        "loss": _squares,
    }


class _ConvAttentionLayer(nn.Module):
    """A depthwise convolution, attention by einsum, and a gated convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.near = nn.Conv1d(width, width, 5, padding=2, groups=width)
        self.qkv, self.gate, self.norm = (
            nn.Conv1d(width, 3 * width, 1),
            nn.Conv1d(width, 2 * width, 1),
            nn.GroupNorm(4, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.near(x)).unflatten(1, (3, 4, -1)).unbind(1)
        weights = torch.einsum("bhdq,bhdk->bhqk", q, k).mul(q.shape[2] ** -0.5).softmax(-1)
        x = x + torch.einsum("bhqk,bhdk->bhdq", weights, v).flatten(1, 2)
        return x + nn.functional.glu(self.gate(self.norm(x)), dim=1)


def conv_attention_tiny() -> dict[str, Any]:
    """Four layers of convolution and attention over 96 positions, width 32, batch 8."""
    return {
        "model": _Layers(*(_ConvAttentionLayer(32) for _ in range(4))),
        "batch": torch.randn(8, 32, 96),
        "loss": _squares,
    }


class _StateSpaceLayer(nn.Module):
    """Sums over time, each channel with a decay of its own, gated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.decay, self.mix = nn.Parameter(torch.randn(width)), nn.Linear(width, 2 * width)
        self.norm = nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(x.shape[1], dtype=x.dtype)
        kernel = torch.exp(-nn.functional.softplus(self.decay)[:, None] * steps)
        y = torch.cumsum(self.norm(x), 1) * kernel.t()
        return x + nn.functional.glu(self.mix(y), -1)


def mlp_tiny() -> dict[str, Any]:
    """Four times LayerNorm, Linear, GELU and Linear, 32 wide and 128 inside, on 256 rows."""
    layers = (nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
    return {"model": _Layers(*layers), "batch": torch.randn(256, 32), "loss": _squares}


def state_space_tiny() -> dict[str, Any]:
    """Six gated layers of decaying sums over 128 steps, width 48, batch 8."""
    return {
        "model": _Layers(*(_StateSpaceLayer(48) for _ in range(6))),
        "batch": torch.randn(8, 128, 48),
        "loss": _squares,
    }
