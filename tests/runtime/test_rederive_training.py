"""Training a small Llama-like model on bytes of a source file: the loss curve is that of plain, bit for bit."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recoup
from recoup.runtime import execution_context
from tests.collector import live_tensors, resting

DIM, HEADS, LENGTH, BATCH = 64, 4, 48, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.gate, self.up = (nn.Linear(DIM, 3 * DIM, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * DIM, DIM, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        q, k = (t * cos + torch.cat([-t[..., 8:], t[..., :8]], -1) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, DIM), nn.Linear(DIM, 256, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.RMSNorm(DIM)
        angles = torch.outer(torch.arange(LENGTH), 10000 ** (-torch.arange(8) / 8)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def train(steps: int, rederive: bool) -> tuple[list[float], list[int]]:
    torch.manual_seed(0)
    text = torch.tensor(list(inspect.getsource(torch.nn.functional).encode()[:200_000]))
    model = Llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses, live = [], []
    for step in range(steps):
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,)).tolist()
        tokens = torch.stack([text[i : i + LENGTH + 1] for i in starts])
        if rederive:
            with recoup.rederive():
                loss = model(tokens[:, :-1], tokens[:, 1:])
        else:
            loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del loss
        if step % 20 == 5:
            live.append(live_tensors())
    return losses, live


@pytest.mark.slow
def test_many_steps_of_a_small_llama() -> None:
    with resting():
        plain, _ = train(60, False)
        before = execution_context.counters()[1]
        mine, live = train(60, True)
    assert execution_context.counters()[1] - before > 60 * 3
    assert mine == plain
    assert len(set(live)) == 1
    assert all(map(math.isfinite, mine)) and mine[-1] < mine[0] - 1
