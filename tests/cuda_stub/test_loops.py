"""Loops over time on a GPU: the device's random stream is where it was when a step runs again."""

from __future__ import annotations

import collections
import queue

import pytest
import torch
from torch import nn
from torch.nn import functional

import recoup
from recoup.ir.decision import Decision, Loop, Recompute
from recoup.recurrent import checkpoint_timesteps
from recoup.runtime.apply import apply_decisions
from tests.cuda_stub.kit import stub

# A replay puts back the plain objects that its forward changes; what lies in a queue it cannot see.
_drawn: queue.SimpleQueue[tuple[bool, str]] = queue.SimpleQueue()


def _states() -> dict[bool, collections.Counter[str]]:
    """Returns how often each state was found since the last time, by whether it was in a replay."""
    found: dict[bool, collections.Counter[str]] = {True: collections.Counter(), False: collections.Counter()}
    while not _drawn.empty():
        again, where = _drawn.get()
        found[again][where] += 1
    return found


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        where = bytes(torch.cuda.get_rng_state().numpy()), torch.is_autocast_enabled("cuda")
        _drawn.put((recoup.is_recomputing(), repr(where)))
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
            with stub.counting() as seen:
                with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                    loss = model(xs)
                loss.backward()
            states = _states()
            assert sum(states[False].values()) == 12
            assert set(states[True]) == set(states[False])
            assert seen["syncs"] == seen["event_syncs"] == 0
    finally:
        handle.remove()
