"""Random training steps: functions, submodules, in place, views, loops, dropout, generators, frozen, random depth."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 16
ROWS = 48
ATTENTION = 8  # the kind of step that runs it


class Child(nn.Module):
    """A submodule with work of its own."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if kind == 0 else nn.LayerNorm(WIDTH)
        self.act = nn.GELU() if kind == 0 else nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        x = self.norm(self.act(x.mul_(0.9) if self.kind else x))
        return F.relu_(x) if self.kind else torch.tanh(x)


class Doubled(torch.autograd.Function):
    """A function of the user's that saves its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x) * 2
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return gradients[0] * (2 - y * y / 2)


class Program(nn.Module):
    """A fixed random sequence of operations on a few tensors; what it does may depend on the number of the step."""

    def __init__(self, seed: int, *, length: int = 24) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.steps = [(rng.randrange(26), rng.randrange(1 << 30)) for _ in range(length)]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(4))
        self.weights[rng.randrange(4)].requires_grad_(rng.random() < 0.7)
        self.children_ = nn.ModuleList(Child(i) for i in range(2))
        self.varies = rng.random() < 0.3
        self.generator = torch.Generator().manual_seed(seed)
        self.num_steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        pool = [x, x * 0.5]
        steps = self.steps
        if self.varies and self.num_steps % 2 == 0:
            steps = steps[:5] + steps[7:]
        for kind, choice in steps:
            a = pool[choice % len(pool)]
            b = pool[choice // 7 % len(pool)]
            pool.append(self.operate(kind, choice, a, b))
            pool = pool[-5:]
        return sum(t.mean(0).sum() + t.pow(2).mean() for t in pool)  # type: ignore[return-value]

    def operate(self, kind: int, choice: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Returns a new tensor of shape (rows, WIDTH)."""
        weight, rows = self.weights[choice % 4], len(a)
        if kind == 0:
            return F.linear(a, weight)
        if kind == 1:
            return torch.tanh(a) * torch.sigmoid(b)
        if kind == 2:
            return F.layer_norm(a + b, (WIDTH,))
        if kind == 3:
            return F.dropout(a, 0.3)
        if kind == 4:
            return F.gelu(a)
        if kind == 5:
            return self.children_[choice % 2](a)
        if kind == 6:
            y = a @ weight
            y.add_(b)
            return y.mul_(0.7)
        if kind == 7:
            return torch.cat([a[:, : WIDTH // 2], b[:, WIDTH // 2 :].flip(1)], dim=1)
        if kind == ATTENTION:
            heads = a.view(1, rows, 4, WIDTH // 4).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(rows, WIDTH)
        if kind == 9:
            order = torch.arange(rows, device=a.device).roll(choice % ROWS)
            return torch.zeros_like(a).index_add(0, order, (a[order] * b).to(a.dtype))
        if kind == 10:
            for _ in range(3):
                a = a + torch.sin(F.linear(a, weight)) / 3
            return a
        if kind == 11:
            y = a.clone()
            y[: rows // 2] = torch.relu(b[: rows // 2])
            return y
        if kind == 12:
            return F.conv1d(a.t().unsqueeze(0), weight.unsqueeze(-1)).squeeze(0).t()
        if kind == 13:
            y = a * 2
            y[:, 0].zero_()
            return y.exp().clamp(max=3.0)
        if kind == 14:
            return F.max_pool1d(a.unsqueeze(0), 3, stride=1, padding=1).squeeze(0)
        if kind == 15:
            y = torch.empty_like(a)
            y.copy_(a)
            return F.softmax(y, dim=-1) * b
        if kind == 16:
            return a.detach() * b + torch.rand_like(a) * 0.1
        if kind == 17:
            top = a.topk(4, dim=1)
            return a.scatter(1, top.indices, top.values * 0.5)
        if kind == 18:
            noise = torch.randn(rows, WIDTH, generator=self.generator)
            return torch.where(torch.rand(rows, 1, generator=self.generator) < 0.5, a, b + noise.to(a.dtype) / 9)
        if kind == 19:
            y = torch.fft.irfft(torch.fft.rfft(a.float(), dim=0) * 0.5, n=rows, dim=0)
            return y.cumsum(1).to(a.dtype) / WIDTH
        if kind == 20:
            parts = [part * (i + 1) for i, part in enumerate(torch.split(a, [8, 16, rows - 24]))]
            return torch.cat(parts[::-1]) if self.num_steps % 2 or not self.varies else torch.cat(parts)
        if kind == 21:
            return torch.einsum("ri,ij,rj->ri", a, weight.to(a.dtype), b) / WIDTH
        if kind == 22:
            return Doubled.apply(a) + b.unfold(0, 1, 1).squeeze(-1)
        if kind == 23:
            gates = torch.cat([weight, weight * 0.5, weight]).to(a.dtype)
            return torch.gru_cell(b, torch.gru_cell(a, b, gates, gates), gates, gates)
        if kind == 24:
            gates = torch.cat([weight, weight * 0.5, weight, weight]).to(a.dtype)
            state, memory = torch.lstm_cell(a, (b, a), gates, gates)
            return state + memory
        with torch.no_grad():
            scale = a.abs().mean()
        return a / (scale + 1) + torch.outer(b[:, 0], weight[0])
