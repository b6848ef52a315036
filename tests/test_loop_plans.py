"""`plan` and `fit` for modules that loop over time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.cost.devices import get_device
from recoup.cost.roofline import RooflineCost
from recoup.ir.plan import Plan
from recoup.planner.driver import Planner
from recoup.solver.loops import find_loop
from tests.thorough import cases


class Recurrent(nn.Module):
    def __init__(self, *, lstm: bool = False) -> None:
        super().__init__()
        self.cell: Any = nn.LSTMCell(8, 32) if lstm else nn.GRUCell(8, 32)
        self.head = nn.Linear(32, 4)
        self.lstm = lstm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[1], 32)
        state: Any = (h, h) if self.lstm else h
        for frame in x:
            state = self.cell(frame, state)
        return self.head(state[0] if self.lstm else state).square().mean()


def _trace(model: nn.Module, *batch: Any) -> Any:
    spec = StepSpec(model=model, batch=batch, objective=Objective(), optimizer=None, dialect="cpu", round_bytes=1)
    return capture(spec)


def test_a_loop_is_found() -> None:
    torch.manual_seed(0)
    loop = find_loop(_trace(Recurrent(), torch.randn(20, 4, 8)))
    assert loop is not None
    assert (loop.path, loop.num_calls, loop.state_bytes) == ("cell", 20, 4 * 32 * 4)
    assert loop.tape_bytes > loop.state_bytes
    assert find_loop(_trace(Recurrent(), torch.randn(8, 4, 8))) is None  # too few to be worth a plan of its own
    assert find_loop(_trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8))) is None


@pytest.mark.slow
@pytest.mark.parametrize("lstm", cases([False, True], [True]))
def test_fit(lstm: bool) -> None:
    torch.manual_seed(0)
    model, x = Recurrent(lstm=lstm), torch.randn(64, 32, 8)
    fit = recoup.fit(model, (x,), budget="35%", timed=False)
    assert fit.evidence.exact
    assert fit.evidence.peak_bytes <= fit.plan.budget_bytes
    assert [d.path for d in fit.plan.decisions] == ["cell"]
    assert fit.plan.decisions[0].chunk
    assert "calls at a time" in str(fit.plan)
    assert Plan.from_json(fit.plan.to_json()) == fit.plan
    fit.applied.remove()


@pytest.mark.slow
def test_more_memory_chunks_fewer_calls() -> None:
    torch.manual_seed(0)
    spec = StepSpec(
        model=Recurrent(),
        batch=(torch.randn(64, 32, 8),),
        objective=Objective(),
        optimizer=None,
        dialect="cpu",
        round_bytes=1,
    )
    planner = Planner(spec, cost=RooflineCost(get_device("cpu-generic")), actions=("recompute",))
    plain = planner.plain.peak_bytes
    small, large = planner.fit(plain * 40 // 100), planner.fit(plain * 75 // 100)
    assert small is not None and large is not None
    assert (large.decisions[0].calls or 64) < (small.decisions[0].calls or 64)
    assert large.recomputed_flops < small.recomputed_flops
    assert planner.fit(plain * 5 // 100) is None
    least = planner.smallest()
    assert least.peak_bytes <= small.peak_bytes
    again = planner.fit(least.peak_bytes)
    assert again is not None and again.peak_bytes <= least.peak_bytes


class _Gate(nn.Module):
    """A token of a gated recurrence; `wkv`: RWKV's sums with their running maximum, else a state that decays."""

    def __init__(self, width: int, *, wkv: bool) -> None:
        super().__init__()
        self.decay, self.bonus, self.wkv = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width)), wkv

    def forward(self, state: Any, key: torch.Tensor, value: torch.Tensor) -> Any:
        if not self.wkv:
            state = state * torch.exp(-key.exp().unsqueeze(-1) * self.decay) + torch.einsum("bi,bj->bij", key, value)
            return state, (state * self.bonus).sum(-1)
        top, sums, weights = state
        most = torch.maximum(top, key + self.bonus)
        old, new = torch.exp(top - most), torch.exp(key + self.bonus - most)
        out = (old * sums + new * value) / (old * weights + new)
        most = torch.maximum(top - self.decay, key)
        old, new = torch.exp(top - self.decay - most), torch.exp(key - most)
        return (most, old * sums + new * value, old * weights + new), out


class _Scanned(nn.Module):
    def __init__(self, *, wkv: bool, width: int = 16) -> None:
        super().__init__()
        self.project, self.cell = nn.Linear(width, 2 * width), _Gate(width, wkv=wkv)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zeros = x.new_zeros(x.shape[0], x.shape[2])
        state: Any = (zeros - 30, zeros, zeros) if self.cell.wkv else zeros.unsqueeze(-1) * zeros.unsqueeze(1)
        outputs = []
        for token in self.project(x).unbind(1):
            state, out = self.cell(state, *token.chunk(2, -1))
            outputs.append(out)
        return torch.stack(outputs, 1).square().mean()


@pytest.mark.parametrize("wkv", [False, True])
def test_recurrences_of_mamba_and_rwkv_run_in_chunks(wkv: bool) -> None:
    torch.manual_seed(0)
    model, x = _Scanned(wkv=wkv), torch.randn(8, 48, 16)
    fit = recoup.fit(model, (x,), budget="50%", actions=("recompute",), timed=False)
    assert fit.evidence.exact and fit.evidence.peak_bytes <= fit.plan.budget_bytes
    (chunked,) = [d for d in fit.plan.decisions if d.path == "cell"]
    assert 1 < chunked.chunk < 48, "only the state that enters a chunk is kept"
    fit.applied.remove()
