"""The models of `bench.gpu` in plain torch: a Llama of a billion parameters, ViT-L, ResNet-50, a U-Net. Random weights.

Each function takes `small`: the same code with a few layers of little width, for a rehearsal on a CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model on the device, a batch, its loss, the paths of its layers, and what a step is worth.

    Attributes:
        items: tokens or images in a step. unit: which of the two.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], torch.Tensor]
    layers: list[str]
    items: int
    unit: str


class _RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        return self.weight * y.to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class _Attention(nn.Module):
    """Self-attention; causal with rotary positions if `cos` and `sin` are given."""

    def __init__(self, width: int, heads: int, kv_heads: int, *, bias: bool) -> None:
        super().__init__()
        self.size = width // heads
        self.q = nn.Linear(width, width, bias=bias)
        self.k = nn.Linear(width, kv_heads * self.size, bias=bias)
        self.v = nn.Linear(width, kv_heads * self.size, bias=bias)
        self.o = nn.Linear(width, width, bias=bias)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None
    ) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if cos is not None and sin is not None:
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cos is not None)
        return self.o(y.transpose(1, 2).flatten(2))


class _GatedMlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _LlamaLayer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _RmsNorm(width), _RmsNorm(width)
        self.attention = _Attention(width, heads, kv_heads, bias=False)
        self.mlp = _GatedMlp(width, inner)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class _Llama(nn.Module):
    def __init__(self, *, width: int, inner: int, heads: int, kv_heads: int, layers: int, vocabulary: int, tokens: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_LlamaLayer(width, inner, heads, kv_heads) for _ in range(layers))
        self.norm = _RmsNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(tokens), 500000.0 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def llama_1b(device: torch.device, *, small: bool) -> Workload:
    """The sizes of Llama 3.2 1B but for a vocabulary of 32,000; bfloat16, 4 sequences of 4,096 tokens."""
    sizes = {"width": 2048, "inner": 8192, "heads": 32, "kv_heads": 8, "layers": 16, "vocabulary": 32000}
    batch, tokens = 4, 4096
    if small:
        sizes = {"width": 64, "inner": 128, "heads": 4, "kv_heads": 2, "layers": 3, "vocabulary": 256}
        batch, tokens = 2, 64
    with device:
        model = _Llama(**sizes, tokens=tokens).to(torch.bfloat16)
        ids = torch.randint(0, sizes["vocabulary"], (batch, tokens))

    def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1).float(), batch.roll(-1, dims=1).flatten())

    layers = [f"layers.{i}" for i in range(sizes["layers"])]
    return Workload(model=model, batch=ids, loss=loss, layers=layers, items=ids.numel(), unit="tokens")


class _VitLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads, heads, bias=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _Vit(nn.Module):
    def __init__(self, *, width: int, heads: int, layers: int, image: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.zeros((image // patch) ** 2, width))
        self.layers = nn.ModuleList(_VitLayer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def _images(model: nn.Module, batch: int, image: int, layers: list[str], device: torch.device) -> Workload:
    dtype = next(model.parameters()).dtype
    pixels = torch.randn(batch, 3, image, image, device=device, dtype=dtype)
    return Workload(
        model=model,
        batch=pixels,
        loss=lambda output, batch: output.float().square().mean(),
        layers=layers,
        items=batch,
        unit="images",
    )


def vit_l(device: torch.device, *, small: bool) -> Workload:
    """ViT-L/16 with pooling by mean; bfloat16, 128 images of 224 pixels."""
    sizes = {"width": 1024, "heads": 16, "layers": 24, "image": 224, "patch": 16}
    if small:
        sizes = {"width": 48, "heads": 3, "layers": 3, "image": 64, "patch": 16}
    with device:
        model = _Vit(**sizes).to(torch.bfloat16)
    layers = [f"layers.{i}" for i in range(sizes["layers"])]
    return _images(model, 32 if small else 128, sizes["image"], layers, device)


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def resnet50(device: torch.device, *, small: bool) -> Workload:
    """ResNet-50 in float32, 184 images of 224 pixels: the setting of MONeT (arXiv 2010.14501)."""
    blocks, width = ((1, 1, 1), 8) if small else ((3, 4, 6, 3), 64)
    with device:
        layers: list[nn.Module] = [
            nn.Sequential(
                nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
            )
        ]
        inputs = width
        for stage, count in enumerate(blocks):
            for i in range(count):
                layers.append(_Bottleneck(inputs, width * 2**stage, 2 if stage and not i else 1))
                inputs = 4 * width * 2**stage
        tail = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
        model = nn.Sequential(*layers, tail)
    paths = [str(i) for i in range(1, len(layers))]
    return _images(model, 4 if small else 184, 64 if small else 224, paths, device)


class _UnetBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(x)))


class _Unet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        ends = list(zip([width, *widths[:-1]], widths))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(_UnetBlock(a, b) for a, b in ends)
        self.middle = _UnetBlock(widths[-1], widths[-1])
        self.up = nn.ModuleList(_UnetBlock(2 * b, a) for a, b in ends)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in reversed(self.up):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], dim=1))
        return self.head(x)


def unet(device: torch.device, *, small: bool) -> Workload:
    """A U-Net with GroupNorm and SiLU in bfloat16, 32 images of 256 pixels."""
    with device:
        model = _Unet(8 if small else 64).to(torch.bfloat16)
    paths = [f"{part}.{i}" for part in ("down", "up") for i in range(4)]
    layers = [*paths[:4], "middle", *paths[4:]]
    return _images(model, 2 if small else 32, 32 if small else 256, layers, device)


class _GptLayer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop1, self.drop2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=p)
        x = x + self.drop1(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.drop2(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class _Gpt(nn.Module):
    def __init__(self, *, width: int, heads: int, layers: int, vocabulary: int, tokens: int, dropout: float) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(_GptLayer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.drop(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def gpt2(device: torch.device, *, small: bool, dropout: float = 0.1, batch: int = 8, layers: int = 12) -> Workload:
    """The sizes of GPT-2 small, in float32; 8 sequences of 1,024 tokens."""
    sizes = {"width": 768, "heads": 12, "layers": layers, "vocabulary": 50257, "tokens": 1024}
    if small:
        sizes = {"width": 64, "heads": 4, "layers": 3, "vocabulary": 256, "tokens": 64}
    with device:
        model = _Gpt(**sizes, dropout=dropout)
        ids = torch.randint(0, sizes["vocabulary"], (2 if small else batch, sizes["tokens"]))

    def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    paths = [f"layers.{i}" for i in range(sizes["layers"])]
    return Workload(model=model, batch=ids, loss=loss, layers=paths, items=ids.numel(), unit="tokens")


class Autocast(nn.Module):
    """A model whose forward runs under CUDA's autocast."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=self.dtype):
            return self.model(*batch)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "llama-1b": llama_1b,
    "vit-l": vit_l,
    "resnet50": resnet50,
    "unet": unet,
}
