"""Models of strangers: einsums, Fourier layers, cumulative sums, gathers, ragged lists, nested functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.functional_models import Functional, FunctionalModel, Wrap


class AxialEinsum(Functional):
    """Attention along rows, then along columns, all by einsum."""

    def __init__(self, wrap: Wrap, width: int = 32, heads: int = 4, num_layers: int = 4) -> None:
        super().__init__(wrap)
        self.num_layers = num_layers
        for i in range(num_layers):
            for name in ("query", "key", "value"):
                self.weights[f"{name}{i}"] = nn.Parameter(torch.randn(heads, width, width // heads) / width**0.5)
            self.weights[f"out{i}"] = nn.Parameter(torch.randn(heads, width // heads, width) / width**0.5)

    def layer(self, x: Tensor, i: int) -> Tensor:
        for flipped in (False, True):
            y = F.layer_norm(x.transpose(1, 2) if flipped else x, x.shape[-1:])
            q, k, v = (
                torch.einsum("brtw,hwc->brhtc", y, self.weights[f"{n}{i}"]).flatten(0, 1)
                for n in ("query", "key", "value")
            )
            scores = torch.softmax(torch.einsum("bhqc,bhkc->bhqk", q, k) / q.shape[-1] ** 0.5, -1)
            mixed = torch.einsum("bhqk,bhkc->bhqc", scores, v).unflatten(0, y.shape[:2])
            y = torch.einsum("brhtc,hcw->brtw", mixed, self.weights[f"out{i}"])
            x = x + (y.transpose(1, 2) if flipped else y)
        return x

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.num_layers):
            x = self.wrap(self.layer, x, i)
        return x


class FourierOperator(Functional):
    """A Fourier neural operator: complex weights on the lowest frequencies, beside a pointwise product."""

    def __init__(self, wrap: Wrap, width: int = 24, modes: int = 8, num_layers: int = 4) -> None:
        super().__init__(wrap)
        self.num_layers, self.modes = num_layers, modes
        for i in range(num_layers):
            self.weights[f"low{i}"] = nn.Parameter(torch.randn(width, width, modes, modes, 2) / width)
            self.weight(f"point{i}", width, width)

    def layer(self, x: Tensor, i: int) -> Tensor:
        modes = self.modes
        spectrum = torch.fft.rfft2(x)
        low = torch.einsum(
            "bixy,ioxy->boxy", spectrum[..., :modes, :modes], torch.view_as_complex(self.weights[f"low{i}"])
        )
        mixed = torch.zeros_like(spectrum)
        mixed[..., :modes, :modes] = low
        return F.gelu(
            torch.fft.irfft2(mixed, s=x.shape[-2:]) + torch.einsum("bixy,oi->boxy", x, self.weights[f"point{i}"])
        )

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.num_layers):
            x = self.wrap(self.layer, x, i)
        return x


class CumulativeAttention(Functional):
    """Causal linear attention by cumulative sums of outer products, with a running maximum as its gate."""

    def __init__(self, wrap: Wrap, width: int = 32, num_layers: int = 4) -> None:
        super().__init__(wrap)
        self.num_layers = num_layers
        for i in range(num_layers):
            for name in ("query", "key", "value", "out"):
                self.weight(f"{name}{i}", width if name == "out" else 16, 16 if name == "out" else width)

    def layer(self, x: Tensor, i: int) -> Tensor:
        def projected(name: str) -> Tensor:
            return F.linear(F.layer_norm(x, x.shape[-1:]), self.weights[f"{name}{i}"])

        query, key, value = F.elu(projected("query")) + 1, F.elu(projected("key")) + 1, projected("value")
        states = (key.unsqueeze(-1) * value.unsqueeze(-2)).cumsum(1)
        read = (query.unsqueeze(-2) @ states).squeeze(-2) / (query * key.cumsum(1)).sum(-1, keepdim=True)
        gate = torch.sigmoid(value.cummax(1).values)
        return x + F.linear(read * gate, self.weights[f"out{i}"])

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.num_layers):
            x = self.wrap(self.layer, x, i)
        return x


class PointCloud(Functional):
    """Edge convolutions over the nearest neighbours, found anew in each layer."""

    def __init__(self, wrap: Wrap, width: int = 32, num_layers: int = 4, neighbours: int = 8) -> None:
        super().__init__(wrap)
        self.num_layers, self.neighbours = num_layers, neighbours
        for i in range(num_layers):
            self.weight(f"edge{i}", width, 2 * width)
            self.weight(f"more{i}", width, width)

    def layer(self, x: Tensor, i: int) -> Tensor:
        nearest = torch.cdist(x, x).topk(self.neighbours, largest=False).indices
        batch, num, width = x.shape
        where = nearest.reshape(batch, -1, 1).expand(-1, -1, width)
        near = x.gather(1, where).view(batch, num, self.neighbours, width)
        here = x.unsqueeze(2).expand_as(near)
        y = F.relu(F.linear(torch.cat([here, near - here], -1), self.weights[f"edge{i}"]))
        y = F.leaky_relu(F.linear(y, self.weights[f"more{i}"]), 0.2)
        return x + y.amax(2)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.num_layers):
            x = self.wrap(self.layer, x, i)
        return x


class RaggedSentences(Functional):
    """Sentences of different lengths in a list, each attended by itself, pooled by scatters."""

    def __init__(self, wrap: Wrap, width: int = 48, num_layers: int = 4) -> None:
        super().__init__(wrap)
        self.num_layers = num_layers
        for i in range(num_layers):
            for name, rows in (("qkv", 3 * width), ("up", 2 * width), ("down", width)):
                self.weight(f"{name}{i}", rows, 2 * width if name == "down" else width)

    def layer(self, i: int, *sentences: Tensor) -> tuple[Tensor, ...]:
        done = []
        for x in sentences:
            q, k, v = F.linear(F.layer_norm(x, x.shape[-1:]), self.weights[f"qkv{i}"]).chunk(3, -1)
            x = x + torch.softmax(q @ k.t() / q.shape[-1] ** 0.5, -1) @ v
            done.append(x + F.linear(F.gelu(F.linear(x, self.weights[f"up{i}"])), self.weights[f"down{i}"]))
        return tuple(done)

    def forward(self, *sentences: Tensor) -> Tensor:
        for i in range(self.num_layers):
            sentences = self.wrap(self.layer, i, *sentences)
        owner = torch.cat([torch.full((len(x),), n) for n, x in enumerate(sentences)])
        words = torch.cat(sentences)
        index = owner.unsqueeze(1).expand_as(words)
        pooled = torch.zeros(len(sentences), words.shape[1])
        return pooled.scatter_reduce(0, index, words, "mean", include_self=False)


class Recursive(Functional):
    """A pyramid that calls itself: functions inside of functions, skips by closure."""

    def __init__(self, wrap: Wrap, width: int = 12, depth: int = 3) -> None:
        super().__init__(wrap)
        self.depth = depth
        for i in range(depth + 1):
            for name in ("down", "up"):
                self.weights[f"{name}{i}"] = nn.Parameter(torch.randn(width, width, 3, 3) / (9 * width) ** 0.5)

    def stage(self, x: Tensor, name: str, i: int) -> Tensor:
        def normal(y: Tensor) -> Tensor:
            return F.group_norm(y, 4)

        def twice(y: Tensor) -> Tensor:
            for _ in range(2):
                y = F.silu(normal(F.conv2d(y, self.weights[f"{name}{i}"], padding=1)))
            return y

        return x + twice(x)

    def level(self, x: Tensor, i: int) -> Tensor:
        x = self.wrap(self.stage, x, "down", i)
        if i < self.depth:
            below = self.level(F.avg_pool2d(x, 2), i + 1)
            x = x + F.interpolate(below, scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.wrap(self.stage, x, "up", i)

    def forward(self, x: Tensor) -> Tensor:
        return self.level(x, 0)


STRANGERS: dict[str, FunctionalModel] = {
    "axial einsums": FunctionalModel(AxialEinsum, lambda: (torch.randn(2, 32, 32, 32),)),
    "Fourier operator": FunctionalModel(FourierOperator, lambda: (torch.randn(2, 24, 64, 64),)),
    "cumulative attention": FunctionalModel(CumulativeAttention, lambda: (torch.randn(4, 256, 32),)),
    "point cloud": FunctionalModel(PointCloud, lambda: (torch.randn(2, 256, 32),)),
    "ragged sentences": FunctionalModel(
        RaggedSentences, lambda: tuple(torch.randn(num, 48) for num in (40, 96, 17, 160, 64, 128))
    ),
    "recursive pyramid": FunctionalModel(Recursive, lambda: (torch.randn(2, 12, 64, 64),)),
}
