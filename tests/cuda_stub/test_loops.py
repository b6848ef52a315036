"""Loops over time on a GPU: the device's random stream is where it was when a step runs again."""

from __future__ import annotations

import collections

import pytest
import stub
import torch
from torch import nn
from torch.nn import functional

import recoup
from recoup.ir.decision import Decision, Loop, Recompute
from recoup.recurrent import checkpoint_timesteps
from recoup.runtime.apply import apply_decisions

_drawn: dict[bool, collections.Counter[bytes]] = {}


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        where = bytes(torch.cuda.get_rng_state().numpy()), torch.is_autocast_enabled("cuda")
        _drawn.setdefault(recoup.is_recomputing(), collections.Counter())[repr(where).encode()] += 1
        q = self.inner(state + x).view(4, 1, 4, 8)
        return torch.tanh(functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5).reshape(4, 32).float())


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = _Cell(), nn.Linear(32, 1)

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(4, 32, device=xs.device)
        for x in xs:
            state = self.cell(state, x)
        return self.out(functional.dropout(state, 0.5)).sum()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["calls", "chunks", "timesteps"])
def test_every_step_runs_again_with_the_stream_and_autocast_of_its_first_time(kind: str, autocast: bool) -> None:
    model, xs = _Net().cuda(), torch.zeros(12, 4, 32, device="cuda")
    decisions: dict[str, list[Decision]] = {
        "calls": [Recompute(path="cell")],
        "chunks": [Loop(path="cell", chunk=4)],
        "timesteps": [],
    }
    handle = checkpoint_timesteps(model, chunk=4) if kind == "timesteps" else apply_decisions(model, decisions[kind])
    try:
        for _ in range(2):
            _drawn.clear()
            with stub.counting() as seen:
                with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                    loss = model(xs)
                loss.backward()
            assert sum(_drawn[False].values()) == 12
            assert set(_drawn[True]) == set(_drawn[False])
            assert seen["syncs"] == seen["event_syncs"] == 0
    finally:
        handle.remove()
