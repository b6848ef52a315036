"""Five more that nobody named: an LSTM by hand, splines on edges, a graph transformer, RevNet, Runge-Kutta."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.functional_models import Functional, FunctionalModel, Wrap


class HandWrittenLSTM(Functional):
    """Two layers of an LSTM cell in plain Python, eight steps a piece."""

    def __init__(self, wrap: Wrap, width: int = 48, num_layers: int = 2) -> None:
        super().__init__(wrap)
        self.num_layers = num_layers
        for i in range(num_layers):
            self.weight(f"inputs{i}", 4 * width, width)
            self.weight(f"states{i}", 4 * width, width)

    def steps(self, x: Tensor, hidden: Tensor, cell: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor]:
        outputs = []
        for t in range(x.shape[1]):
            gates = F.linear(x[:, t], self.weights[f"inputs{i}"]) + F.linear(hidden, self.weights[f"states{i}"])
            entry, forget, change, out = gates.chunk(4, -1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(entry) * torch.tanh(change)
            hidden = torch.sigmoid(out) * torch.tanh(cell)
            outputs.append(hidden)
        return torch.stack(outputs, 1), hidden, cell

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.num_layers):
            hidden = cell = torch.zeros(x.shape[0], x.shape[2])
            pieces = []
            for piece in x.split(8, 1):
                piece, hidden, cell = self.wrap(self.steps, piece, hidden, cell, i)
                pieces.append(piece)
            x = torch.cat(pieces, 1)
        return x


class SplineEdges(Functional):
    """A Kolmogorov-Arnold network: a sum of radial bases for each edge, beside a SiLU."""

    def __init__(self, wrap: Wrap, width: int = 24, num_layers: int = 5, num_bases: int = 6) -> None:
        super().__init__(wrap)
        self.num_layers = num_layers
        self.register_buffer("centres", torch.linspace(-2, 2, num_bases))
        for i in range(num_layers):
            self.weight(f"spline{i}", width, width * num_bases)
            self.weight(f"base{i}", width, width)

    def layer(self, x: Tensor, i: int) -> Tensor:
        bases = torch.exp(-((x.unsqueeze(-1) - self.centres) ** 2))
        y = F.linear(bases.flatten(1), self.weights[f"spline{i}"])
        return F.layer_norm(y + F.linear(F.silu(x), self.weights[f"base{i}"]), x.shape[-1:])

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.num_layers):
            x = self.wrap(self.layer, x, i)
        return x


class GraphTransformer(Functional):
    """Attention over edges: softmax over each node's edges by scatters, then a gated feed-forward."""

    def __init__(self, wrap: Wrap, width: int = 32, heads: int = 4, num_layers: int = 4) -> None:
        super().__init__(wrap)
        self.num_layers, self.heads = num_layers, heads
        for i in range(num_layers):
            self.weight(f"qkv{i}", 3 * width, width)
            self.weight(f"gated{i}", 4 * width, width)
            self.weight(f"down{i}", width, 2 * width)

    def layer(self, x: Tensor, source: Tensor, target: Tensor, i: int) -> Tensor:
        qkv = F.linear(F.layer_norm(x, x.shape[-1:]), self.weights[f"qkv{i}"])
        q, k, v = qkv.view(len(x), 3, self.heads, -1).unbind(1)
        scores = (q[target] * k[source]).sum(-1) / q.shape[-1] ** 0.5
        index = target.unsqueeze(1).expand_as(scores)
        highest = torch.full((len(x), self.heads), -1e9).scatter_reduce(0, index, scores, "amax")
        weights = torch.exp(scores - highest[target])
        total = torch.zeros_like(highest).scatter_add(0, index, weights)
        mixed = torch.zeros_like(v).index_add(0, target, v[source] * (weights / total[target]).unsqueeze(-1))
        x = x + mixed.flatten(1)
        a, b = F.linear(F.layer_norm(x, x.shape[-1:]), self.weights[f"gated{i}"]).chunk(2, -1)
        return x + F.linear(F.gelu(a) * b, self.weights[f"down{i}"])

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for i in range(self.num_layers):
            x = self.wrap(self.layer, x, source, target, i)
        return x


class ReversibleBlocks(Functional):
    """Two streams that take turns, as in RevNet, without its backward."""

    def __init__(self, wrap: Wrap, width: int = 12, num_blocks: int = 6) -> None:
        super().__init__(wrap)
        self.num_blocks = num_blocks
        for i in range(num_blocks):
            for name in ("first", "second"):
                self.weight(f"{name}{i}", width, width, 3, 3)

    def block(self, a: Tensor, b: Tensor, i: int) -> tuple[Tensor, Tensor]:
        a = a + F.relu(F.group_norm(F.conv2d(b, self.weights[f"first{i}"], padding=1), 4))
        return a, b + F.relu(F.group_norm(F.conv2d(a, self.weights[f"second{i}"], padding=1), 4))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        for i in range(self.num_blocks):
            a, b = self.wrap(self.block, a, b, i)
        return torch.cat([a, b], 1)


class RungeKutta(Functional):
    """A neural ODE by the classic fourth-order method, all steps in autograd."""

    def __init__(self, wrap: Wrap, width: int = 32, num_steps: int = 8) -> None:
        super().__init__(wrap)
        self.num_steps = num_steps
        self.weight("first", 2 * width, width + 1)
        self.weight("second", width, 2 * width)

    def slope(self, t: float, x: Tensor) -> Tensor:
        y = torch.cat([x, torch.full_like(x[:, :1], t)], -1)
        return F.linear(torch.tanh(F.linear(y, self.weights["first"])), self.weights["second"])

    def step(self, x: Tensor, t: float) -> Tensor:
        h = 1 / self.num_steps
        a = self.slope(t, x)
        b = self.slope(t + h / 2, x + h / 2 * a)
        c = self.slope(t + h / 2, x + h / 2 * b)
        d = self.slope(t + h, x + h * c)
        return x + h / 6 * (a + 2 * b + 2 * c + d)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.num_steps):
            x = self.wrap(self.step, x, i / self.num_steps)
        return x


LAST: dict[str, FunctionalModel] = {
    "hand-written LSTM": FunctionalModel(HandWrittenLSTM, lambda: (torch.randn(64, 48, 48),)),
    "spline edges": FunctionalModel(SplineEdges, lambda: (torch.randn(1024, 24),)),
    "graph transformer": FunctionalModel(
        GraphTransformer,
        lambda: (torch.randn(600, 32), torch.randint(0, 600, (6000,)), torch.randint(0, 600, (6000,))),
    ),
    "reversible blocks": FunctionalModel(ReversibleBlocks, lambda: (torch.randn(2, 24, 48, 48),)),
    "Runge-Kutta": FunctionalModel(RungeKutta, lambda: (torch.randn(2048, 32),)),
}
