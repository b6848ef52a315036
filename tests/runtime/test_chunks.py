"""Several calls of one module as one region: gradients, state, memory."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn

from recoup.errors import ReplayError
from recoup.evidence.memory import measure_peak
from recoup.ir.decision import Decision, Loop, Recompute
from recoup.runtime import planned_call
from recoup.runtime.apply import apply_decisions

STEPS = 13


class Explicit(nn.Module):
    """The state is handed from call to call, among other results; one of them is dropped at once."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = _Cell()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, c, total = x.new_zeros(x.shape[1], 24), x.new_zeros(x.shape[1], 24), torch.zeros(())
        for frame in x:
            (h, _), c = self.cell(frame, state=(h, c))
            total = total + h.square().mean()
        return total


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.back, self.drop = nn.Linear(12, 24), nn.Linear(24, 24), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, c = state
        c = 0.5 * c + torch.tanh(self.into(x)) * torch.sigmoid(self.back(h))
        h = self.drop(torch.tanh(c))
        return (h, h + 1), c


class Attribute(nn.Module):
    """The state is kept by the modules: a potential, BatchNorm's statistics, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = _Keeper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cell.v = None
        return sum((self.cell(frame).square().mean() for frame in x), torch.zeros(()))


class _Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(12, 24), nn.BatchNorm1d(24)
        self.v: Any = None
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.norm(self.into(x))
        self.v = u if self.v is None else 0.8 * self.v * torch.sigmoid(self.v) + u
        self.count += 1
        return torch.tanh(self.v)


def _step(model: nn.Module, x: torch.Tensor) -> list[Any]:
    x = x.clone().requires_grad_()
    torch.manual_seed(5)
    loss = model(x)
    loss.backward()
    kept = [loss.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]
    cell: Any = model.cell
    if hasattr(cell, "count"):
        kept += [torch.tensor(cell.count), cell.v.detach()]
    return kept


@pytest.mark.parametrize("chunk", [1, 2, 4, 13, 20])
@pytest.mark.parametrize("kind", [Explicit, Attribute])
@pytest.mark.parametrize("inside", ["save", "rederive"])
def test_bit_equal(kind: Any, chunk: int, inside: Any) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(STEPS, 6, 12)
    planned = copy.deepcopy(model)
    for calls in (None, 7):
        decision = Loop(path="cell", chunk=chunk, calls=calls, inside=inside)
        expected = _step(model, x)
        with apply_decisions(planned, (decision,)):
            found = _step(planned, x)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_second_step_begins_a_chunk_of_its_own() -> None:
    """Two forwards, then both backwards: the last chunk of the first step is not full when the second begins."""
    torch.manual_seed(0)
    model, x = Attribute(), torch.randn(STEPS, 6, 12)
    planned = copy.deepcopy(model)

    def train(model: nn.Module) -> list[Any]:
        first, second = model(x), model(x * 0.5)
        (first + second).backward()
        return [p.grad for p in model.parameters()] + list(model.buffers())

    expected = train(model)
    with apply_decisions(planned, (Loop(path="cell", chunk=4),)):
        found = train(planned)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_state_changed_between_calls_is_not_silent() -> None:
    torch.manual_seed(0)
    model, x = Attribute(), torch.randn(STEPS, 6, 12)
    with apply_decisions(model, (Loop(path="cell", chunk=4),)):
        first = model.cell(x[0])
        model.cell.v = model.cell.v * 3
        loss = model.cell(x[1]).sum() + first.sum()
        with pytest.raises(ReplayError, match="saved other values"):
            loss.backward()


_FACTOR = "RECOUP_TEST_FACTOR"  # nobody puts the environment back


class _Scales(nn.Module):
    """Saves one tensor for each of its sines, and at the end one that something outside decides about."""

    def __init__(self, num_sines: int) -> None:
        super().__init__()
        self.num_sines = num_sines

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.num_sines):
            x = torch.sin(x)
        return torch.cos(x * float(os.environ.get(_FACTOR, "1")))


@pytest.mark.parametrize("num_sines", [3, 41, 42, 300])
def test_a_difference_in_what_a_region_saves_last_is_found(num_sines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed from it any more, so that no other saved tensor tells."""
    model = nn.Sequential(nn.Linear(8, 8), _Scales(num_sines))
    with apply_decisions(model, (Recompute(path="1"),)):
        loss = model(torch.randn(16, 8)).sum()
        monkeypatch.setenv(_FACTOR, "2")
        with pytest.raises(ReplayError, match="saved other values"):
            loss.backward()


def test_calls_that_nothing_is_decided_about_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Explicit(), torch.randn(STEPS, 6, 12)
    ran: list[str] = []
    run = planned_call._run_planned

    def noting(patched: Any, args: Any, kwargs: Any) -> Any:
        ran.append(patched.settings.path)
        return run(patched, args, kwargs)

    monkeypatch.setattr(planned_call, "_run_planned", noting)
    expected = _step(model, x)
    with apply_decisions(model, [Recompute(path="cell", call=call) for call in (3, 7)]):
        model(x)  # the first call of all finds out which ones are decided about
        ran.clear()
        for p in model.parameters():
            p.grad = None
        found = _step(model, x)
    assert ran == ["", "cell", "cell"]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_chunk_keeps_one_state_and_not_every_one() -> None:
    torch.manual_seed(0)
    model, x = Explicit(), torch.randn(50, 64, 12)

    def peak(*decisions: Decision) -> int:
        with apply_decisions(model, decisions):
            return measure_peak(lambda: model(x).backward(), device=torch.device("cpu"), held_bytes=0)

    plain, single = peak(), peak(Recompute(path="cell"))
    chunks = peak(Loop(path="cell", chunk=3))
    assert chunks < 0.8 * single
    assert chunks < 0.4 * plain
