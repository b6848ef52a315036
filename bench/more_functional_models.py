"""Models that plans by tensor were not made for, as people write them and with checkpoints put by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.functional_models import Functional, FunctionalModel, Wrap


class Perceiver(Functional):
    """A few latents that read a long input again and again by cross attention, as in Perceiver."""

    def __init__(self, wrap: Wrap, width: int = 64, num_layers: int = 6, num_latents: int = 32) -> None:
        super().__init__(wrap)
        self.num_layers = num_layers
        self.latents = nn.Parameter(torch.randn(num_latents, width))
        for i in range(num_layers):
            for name in ("query", "key", "value", "up"):
                self.weight(f"{name}{i}", width, width)

    def layer(self, latents: Tensor, x: Tensor, i: int) -> Tensor:
        query = F.linear(F.layer_norm(latents, latents.shape[-1:]), self.weights[f"query{i}"])
        y = F.layer_norm(x, x.shape[-1:])
        key, value = F.linear(y, self.weights[f"key{i}"]), F.linear(y, self.weights[f"value{i}"])
        read = torch.softmax(query @ key.transpose(1, 2) / key.shape[-1] ** 0.5, -1) @ value
        latents = latents + read
        return latents + F.gelu(F.linear(latents, self.weights[f"up{i}"]))

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(x.shape[0], -1, -1)
        for i in range(self.num_layers):
            latents = self.wrap(self.layer, latents, x, i)
        return latents


class StateSpaceScan(Functional):
    """Diagonal state-space layers with their scan in plain Python, as in S4D and Mamba."""

    def __init__(self, wrap: Wrap, width: int = 32, num_layers: int = 4, states: int = 8) -> None:
        super().__init__(wrap)
        self.num_layers = num_layers
        for i in range(num_layers):
            self.weight(f"decay{i}", width, states)
            self.weight(f"gate{i}", width, width)
            self.weight(f"inputs{i}", states, width)
            self.weight(f"outputs{i}", states, width)

    def layer(self, x: Tensor, i: int) -> Tensor:
        decay, y = torch.sigmoid(self.weights[f"decay{i}"]), F.layer_norm(x, x.shape[-1:])
        inputs, outputs = F.linear(y, self.weights[f"inputs{i}"]), F.linear(y, self.weights[f"outputs{i}"])
        state, found = torch.zeros(x.shape[0], *decay.shape), []
        for t in range(x.shape[1]):
            state = decay * state + y[:, t].unsqueeze(-1) * inputs[:, t].unsqueeze(1)
            found.append((state * outputs[:, t].unsqueeze(1)).sum(-1))
        return x + torch.stack(found, 1) * F.silu(F.linear(x, self.weights[f"gate{i}"]))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.num_layers):
            x = self.wrap(self.layer, x, i)
        return x


class CapsuleRouting(Functional):
    """Capsules with three rounds of routing by agreement."""

    def __init__(self, wrap: Wrap, num_in: int = 64, num_out: int = 8, size: int = 8, num_layers: int = 3) -> None:
        super().__init__(wrap)
        self.num_layers = num_layers
        for i in range(num_layers):
            self.weights[f"votes{i}"] = nn.Parameter(torch.randn(num_in, num_out, size, size) / size**0.5)
            self.weight(f"back{i}", num_in, num_out)

    def layer(self, x: Tensor, i: int) -> Tensor:
        votes = torch.einsum("bni,nmij->bnmj", x, self.weights[f"votes{i}"])
        logits = torch.zeros(votes.shape[:3])
        for _ in range(3):
            capsules = (torch.softmax(logits, 2).unsqueeze(-1) * votes).sum(1)
            square = capsules.pow(2).sum(-1, keepdim=True)
            capsules = capsules * (square / (1 + square) / (square + 1e-6).sqrt())
            logits = logits + (votes * capsules.unsqueeze(1)).sum(-1)
        return x + torch.einsum("bmj,nm->bnj", capsules, self.weights[f"back{i}"])

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.num_layers):
            x = self.wrap(self.layer, x, i)
        return x


class GraphAttention(Functional):
    """A graph attention network: softmax over each node's edges by scatters."""

    def __init__(self, wrap: Wrap, width: int = 32, heads: int = 4, num_layers: int = 4) -> None:
        super().__init__(wrap)
        self.num_layers, self.heads = num_layers, heads
        for i in range(num_layers):
            self.weight(f"node{i}", width, width)
            self.weight(f"source{i}", heads, width // heads)
            self.weight(f"target{i}", heads, width // heads)

    def layer(self, x: Tensor, source: Tensor, target: Tensor, i: int) -> Tensor:
        y = F.linear(x, self.weights[f"node{i}"]).view(x.shape[0], self.heads, -1)
        score = (y * self.weights[f"source{i}"]).sum(-1)[source] + (y * self.weights[f"target{i}"]).sum(-1)[target]
        weight = F.leaky_relu(score, 0.2).exp()
        total = torch.zeros(x.shape[0], self.heads).index_add_(0, target, weight)
        messages = y[source] * (weight / (total[target] + 1e-9)).unsqueeze(-1)
        return x + F.elu(torch.zeros_like(y).index_add_(0, target, messages).flatten(1))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for i in range(self.num_layers):
            x = self.wrap(self.layer, x, source, target, i)
        return x


class PlainRecurrence(Functional):
    """A gated recurrent network in plain Python, eight steps a piece."""

    def __init__(self, wrap: Wrap, width: int = 64) -> None:
        super().__init__(wrap)
        self.weight("inputs", 3 * width, width)
        self.weight("states", 3 * width, width)

    def steps(self, state: Tensor, x: Tensor) -> Tensor:
        for t in range(x.shape[1]):
            a, b = F.linear(x[:, t], self.weights["inputs"]), F.linear(state, self.weights["states"])
            (ra, za, na), (rb, zb, nb) = a.chunk(3, -1), b.chunk(3, -1)
            update = torch.sigmoid(za + zb)
            state = (1 - update) * torch.tanh(na + torch.sigmoid(ra + rb) * nb) + update * state
        return state

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], x.shape[2])
        for piece in x.split(8, 1):
            state = self.wrap(self.steps, state, piece)
        return state


class CouplingFlow(Functional):
    """Affine couplings with convolutions and mixing by an invertible matrix, as in WaveGlow."""

    def __init__(self, wrap: Wrap, channels: int = 8, width: int = 32, num_flows: int = 6) -> None:
        super().__init__(wrap)
        self.num_flows = num_flows
        for i in range(num_flows):
            self.weight(f"mix{i}", channels, channels)
            self.weight(f"first{i}", width, channels // 2, 3)
            self.weight(f"gate{i}", 2 * width, width, 3)
            self.weight(f"last{i}", channels, width, 1)

    def flow(self, x: Tensor, total: Tensor, i: int) -> tuple[Tensor, Tensor]:
        mix = self.weights[f"mix{i}"] + 2 * torch.eye(x.shape[1])
        kept, changed = torch.einsum("oc,bct->bot", mix, x).chunk(2, 1)
        y = F.conv1d(kept, self.weights[f"first{i}"], padding=1)
        a, b = F.conv1d(y, self.weights[f"gate{i}"], padding=1).chunk(2, 1)
        log_scale, shift = F.conv1d(torch.tanh(a) * torch.sigmoid(b), self.weights[f"last{i}"]).chunk(2, 1)
        changed = changed * torch.exp(log_scale.clamp(-2, 2)) + shift
        return torch.cat([kept, changed], 1), total + log_scale.mean() + torch.slogdet(mix).logabsdet

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for i in range(self.num_flows):
            x, total = self.wrap(self.flow, x, total, i)
        return x.pow(2).mean() - 0.01 * total


class VariationalAutoencoder(Functional):
    """A variational autoencoder of functions: noise drawn between encoder and decoder."""

    def __init__(self, wrap: Wrap, width: int = 16, levels: int = 3) -> None:
        super().__init__(wrap)
        self.levels = levels
        widths = [3, *(width * 2**i for i in range(levels))]
        for i in range(levels):
            self.weight(f"down{i}", widths[i + 1], widths[i], 3, 3)
            self.weight(f"same{i}", widths[i + 1], widths[i + 1], 3, 3)
            self.weight(f"up{i}", widths[i], widths[i + 1], 3, 3)
        self.weight("moments", 2 * widths[-1], widths[-1], 1, 1)

    def down(self, x: Tensor, i: int) -> Tensor:
        x = F.silu(F.conv2d(x, self.weights[f"down{i}"], stride=2, padding=1))
        return F.silu(F.conv2d(x, self.weights[f"same{i}"], padding=1)) + x

    def up(self, x: Tensor, i: int) -> Tensor:
        x = F.silu(F.conv2d(x, self.weights[f"same{i}"], padding=1)) + x
        return F.conv2d(F.interpolate(x, scale_factor=2.0), self.weights[f"up{i}"], padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.levels):
            x = self.wrap(self.down, x, i)
        mean, log_variance = F.conv2d(x, self.weights["moments"]).chunk(2, 1)
        x = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        for i in reversed(range(self.levels)):
            x = self.wrap(self.up, x, i)
        return x


class EquivariantGraph(Functional):
    """An E(n)-equivariant graph network: messages from distances, positions moved along differences."""

    def __init__(self, wrap: Wrap, width: int = 32, num_layers: int = 4) -> None:
        super().__init__(wrap)
        self.num_layers = num_layers
        for i in range(num_layers):
            self.weight(f"edge{i}", width, 2 * width + 1)
            self.weight(f"more{i}", width, width)
            self.weight(f"move{i}", 1, width)
            self.weight(f"node{i}", width, 2 * width)

    def layer(self, x: Tensor, places: Tensor, edges: Tensor, i: int) -> tuple[Tensor, Tensor]:
        source, target = edges
        difference = places[source] - places[target]
        distance = difference.pow(2).sum(-1, keepdim=True)
        messages = F.silu(F.linear(torch.cat([x[source], x[target], distance], -1), self.weights[f"edge{i}"]))
        messages = F.silu(F.linear(messages, self.weights[f"more{i}"]))
        moved = difference / (distance + 1) * torch.tanh(F.linear(messages, self.weights[f"move{i}"]))
        places = places + torch.zeros_like(places).index_add(0, target, moved) / 10
        received = torch.zeros_like(x).index_add(0, target, messages)
        return x + F.silu(F.linear(torch.cat([x, received], -1), self.weights[f"node{i}"])), places

    def forward(self, x: Tensor, places: Tensor, edges: Tensor) -> Tensor:
        for i in range(self.num_layers):
            x, places = self.wrap(self.layer, x, places, edges, i)
        return torch.cat([x, places], -1)


MORE_FUNCTIONAL: dict[str, FunctionalModel] = {
    "perceiver": FunctionalModel(Perceiver, lambda: (torch.randn(4, 512, 64),)),
    "state-space scan": FunctionalModel(StateSpaceScan, lambda: (torch.randn(8, 48, 32),)),
    "capsule routing": FunctionalModel(CapsuleRouting, lambda: (torch.randn(64, 64, 8),)),
    "graph attention": FunctionalModel(
        GraphAttention,
        lambda: (torch.randn(1000, 32), torch.randint(0, 1000, (10000,)), torch.randint(0, 1000, (10000,))),
    ),
    "plain recurrence": FunctionalModel(PlainRecurrence, lambda: (torch.randn(64, 64, 64),)),
    "coupling flow": FunctionalModel(CouplingFlow, lambda: (torch.randn(4, 8, 2048),)),
    "variational autoencoder": FunctionalModel(VariationalAutoencoder, lambda: (torch.randn(4, 3, 64, 64),)),
    "equivariant graph": FunctionalModel(
        EquivariantGraph, lambda: (torch.randn(500, 32), torch.randn(500, 3), torch.randint(0, 500, (2, 8000)))
    ),
}
