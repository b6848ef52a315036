"""`fit` and `plan` plan again without what cannot run twice, say what was left out, and take `keep` from the user."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import recoup
from recoup.api import fitting
from recoup.runtime.apply import find_patches


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module], depth: int = 4, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Clamped(MLP):
    """Its forward changes the weights that it reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


class Forces(nn.Module):
    """Differentiates an energy inside its forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(width, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus())
        self.energy.append(nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:
            x = x.requires_grad_()
        return x + torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


class Branches(MLP):
    """Saves other tensors when it runs a second time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if recoup.is_recomputing():
            return x + self.down(torch.tanh(self.up(self.norm(x))) * 2)
        return super().forward(x)


class CountsReplays(MLP):
    """Gives other values when it runs a second time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (1.5 if recoup.is_recomputing() else 1.0))


BLOCKS = {"weights": Clamped, "forces": Forces, "branch": Branches, "values": CountsReplays}


def _batch(width: int = 32) -> torch.Tensor:
    return torch.randn(512, width, generator=torch.Generator().manual_seed(0))


def _loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


def _gradients(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    model.zero_grad()
    _loss(model(batch), batch).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class Mixed(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.odd = nn.ModuleList(block(32) for _ in range(2))
        self.good = nn.ModuleList(MLP(32) for _ in range(5))
        self.out = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.odd, *self.good):
            x = block(x)
        return self.out(x)


@pytest.mark.parametrize("kind", BLOCKS)
def test_only_the_kind_that_cannot_run_twice_is_left_out(kind: str) -> None:
    torch.manual_seed(0)
    model, batch = Mixed(BLOCKS[kind]), _batch()
    plain = _gradients(model, batch)
    fitted = recoup.fit(model, batch, budget="75%", loss=_loss, timed=False, actions=("recompute",))
    assert fitted.evidence.ok and fitted.evidence.gradients_equal
    assert all(torch.equal(a, b) for a, b in zip(plain, _gradients(model, batch), strict=True))
    paths = {p for d in fitted.plan.decisions for p in d.paths}
    assert any(path.startswith("good") for path in paths)
    assert not paths & {"", "odd", "odd.0", "odd.1"}


def test_what_was_left_out_is_said_also_where_no_plan_is_left() -> None:
    torch.manual_seed(0)
    model, batch = Net(CountsReplays), _batch()
    with pytest.raises(recoup.InfeasibleBudget, match=r"`blocks\.\*` cannot run twice and is in no region") as caught:
        recoup.fit(model, batch, budget="45%", loss=_loss, timed=False, actions=("recompute",))
    assert find_patches(model) == []
    budget = int(caught.value.minimum_bytes * 1.01)
    fitted = recoup.fit(model, batch, budget=budget, loss=_loss, timed=False, actions=("recompute",))
    assert fitted.evidence.ok


def test_keep_leaves_a_module_and_what_is_in_it_alone() -> None:
    torch.manual_seed(0)
    model, batch = Net(MLP), _batch()
    free = recoup.plan(model, batch, budget="55%", loss=_loss, actions=("recompute",))
    assert any(p.startswith("blocks.1") for d in free.decisions for p in d.paths)
    with pytest.raises(recoup.InfeasibleBudget):
        recoup.plan(model, batch, budget="55%", loss=_loss, actions=("recompute",), keep="blocks")
    keep = ["blocks.1", "out"]
    kept = recoup.fit(model, batch, budget="75%", loss=_loss, timed=False, actions=("recompute",), keep=keep)
    paths = {p for d in kept.plan.decisions for p in d.paths}
    assert kept.evidence.ok
    assert paths and not any(p in ("", "out") or p.split(".")[:2] == ["blocks", "1"] for p in paths)
    kept.applied.remove()
    with pytest.raises(recoup.UsageError, match=r"keep names 'blocks\.9'.*no module there"):
        recoup.plan(model, batch, budget="75%", loss=_loss, keep=["blocks.9"])


def _measures_above(monkeypatch: pytest.MonkeyPatch, above: Callable[[int], int]) -> list[int]:
    """Has each verified plan measure as many bytes above its prediction as `above` says; returns the predictions."""
    verify = fitting.verify_plan
    predicted: list[int] = []

    def higher(*args: Any, **kwargs: Any) -> Any:
        evidence = verify(*args, **kwargs)
        predicted.append(evidence.predicted_peak_bytes)
        return dataclasses.replace(evidence, peak_bytes=predicted[-1] + above(predicted[-1]))

    monkeypatch.setattr(fitting, "verify_plan", higher)
    return predicted


def test_a_plan_that_measures_above_the_budget_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Net(MLP), torch.randn(512, 32)
    options: dict[str, Any] = {"loss": lambda o, b: o.mean(), "timed": False, "actions": ("recompute",)}
    # Far below the budget, yet the measured peak is a little above it: less of the budget finds the same plan.
    free = recoup.plan(model, x, budget="75%", loss=options["loss"], actions=("recompute",))
    above = free.budget_bytes - free.predicted.peak_bytes + 1000
    predicted = _measures_above(monkeypatch, lambda _: above)
    fit = recoup.fit(model, x, budget="75%", **options)
    assert fit.evidence.ok and fit.evidence.peak_bytes <= fit.plan.budget_bytes
    assert len(predicted) == 2 and predicted[1] < predicted[0] == free.predicted.peak_bytes


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_what_is_refused_is_below_the_smallest_plan_as_measured(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    model, x = Net(MLP), torch.randn(512, 32)
    options: dict[str, Any] = {"loss": lambda o, b: o.mean(), "timed": False, "actions": ("recompute",)}
    smallest = recoup.plan(model, x, budget="min", loss=options["loss"], actions=("recompute",)).predicted.peak_bytes
    predicted = _measures_above(monkeypatch, lambda peak: 200_000 + int(share * (peak - smallest)))
    with pytest.raises(recoup.InfeasibleBudget, match="the smallest plan measured") as caught:
        recoup.fit(model, x, budget=smallest + 150_000, **options)
    assert caught.value.minimum_bytes == predicted[-1] + 200_000 == smallest + 200_000
    assert recoup.fit(model, x, budget=caught.value.minimum_bytes, **options).evidence.ok


def test_the_smallest_peak_is_the_measured_one_where_prediction_was_below(monkeypatch: pytest.MonkeyPatch) -> None:
    _measures_above(monkeypatch, lambda _: 1000)
    model, x = Net(MLP), torch.randn(64, 32)
    fit = recoup.fit(model, x, loss=lambda o, b: o.mean(), budget="min", timed=False)
    assert fit.evidence.ok and fit.plan.budget_bytes == fit.evidence.peak_bytes == fit.plan.predicted.peak_bytes + 1000
    assert any("smallest reachable peak was predicted" in note for note in fit.plan.notes)
    assert find_patches(model)
