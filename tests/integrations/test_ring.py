"""Ring attention's shape: a rank has its share of the tokens, keys and values go round, nothing of it is sent twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import recoup
from recoup.evidence.memory import measure_peak, storage_bytes
from recoup.runtime.apply import apply_decisions

NUM_RANKS, TOKENS, WIDTH = 4, 96, 32


class _Ring(torch.autograd.Function):
    """One rank's attention over the blocks of all ranks, an online softmax; what is sent on is rolled."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, total, top = torch.zeros_like(q), q.new_zeros(*q.shape[:-1], 1), q.new_full((*q.shape[:-1], 1), -1e9)
        block = (k, v)
        for rank in range(NUM_RANKS):
            scores = q @ block[0].transpose(-1, -2) / WIDTH**0.5
            most = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights = torch.exp(scores - most)
            out = out * torch.exp(top - most) + weights @ block[1]
            total, top = total * torch.exp(top - most) + weights.sum(-1, keepdim=True), most
            if rank + 1 < NUM_RANKS:
                block = (block[0].roll(1, 0), block[1].roll(1, 0))  # the next rank's, received into memory of its own
        ctx.save_for_backward(q, k, v, out / total, top + total.log())
        return out / total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        (gradient,) = gradients
        delta = (gradient * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        block = (k, v)
        for rank in range(NUM_RANKS):
            weights = torch.exp(q @ block[0].transpose(-1, -2) / WIDTH**0.5 - lse)
            ds = weights * (gradient @ block[1].transpose(-1, -2) - delta) / WIDTH**0.5
            dq = dq + ds @ block[0]
            dk = dk + (ds.transpose(-1, -2) @ q).roll(-rank, 0)
            dv = dv + (weights.transpose(-1, -2) @ gradient).roll(-rank, 0)
            if rank + 1 < NUM_RANKS:
                block = (block[0].roll(1, 0), block[1].roll(1, 0))
        return dq, dk, dv


class _Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _Ring.apply(q, k, v)  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.ring = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), _Attention()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.ring(*self.project(self.norm(x)).chunk(3, -1))
        return x + self.mlp(x)


def test_a_rank_is_planned_and_its_ring_goes_round_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_Block(), _Block())
    x = torch.randn(4, TOKENS, WIDTH)  # the rank's share: of 4 * TOKENS
    step = {"loss": lambda out, _: out.square().mean(), "actions": ("recompute",)}

    def run() -> None:
        model(x).square().mean().backward()

    def num_sent() -> int:
        with torch.autograd.profiler.profile() as found:
            run()
        return sum(event.name == "aten::roll" for event in found.function_events)

    once = num_sent()
    forward = 2 * 2 * (NUM_RANKS - 1)  # keys and values, in two blocks
    assert once == 2 * forward + 2 * 2 * NUM_RANKS  # backward sends them again, and gradients
    model.zero_grad()
    run()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    plan = recoup.plan(model, (x,), budget="75%", keep=["0.ring", "1.ring"], **step)
    assert plan.decisions
    with recoup.apply(model, plan):
        assert num_sent() == once, "keys and values went round as often as without a plan"
        model.zero_grad()
        held = storage_bytes([*model.parameters(), x])
        peak = measure_peak(run, device=torch.device("cpu"), held_bytes=held)
    assert abs(peak - plan.predicted.peak_bytes) < 0.02 * peak
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True) if p.grad is not None)
    twice = [recoup.Decision(action="recompute", path=str(n)) for n in range(2)]
    with apply_decisions(model, twice):
        assert num_sent() == once + forward, "a region around the ring sends again"
