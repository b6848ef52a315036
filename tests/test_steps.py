"""A step is what the user says it is: his own loop, pairs, autocast, accumulation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import recoup
from recoup.cost.devices import get_device
from recoup.cost.roofline import RooflineCost

_CRITERION = nn.CrossEntropyLoss()
_COST = RooflineCost(get_device("cpu-generic"))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@pytest.fixture
def made() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[_Block(32) for _ in range(3)], nn.Linear(32, 10))
    return model, torch.randn(128, 32), torch.randint(0, 10, (128,))


def _two_losses(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return _CRITERION(model(x), y) + model(x * 2).pow(2).mean()


_STEPS: dict[str, dict[str, Any]] = {
    "pair": {"loss": _CRITERION},
    "two losses": {"step": _two_losses},
    "autocast": {"loss": _CRITERION, "autocast": torch.bfloat16},
    "accumulated": {"loss": _CRITERION, "accumulate": 4, "optimizer": torch.optim.AdamW},
    "scaled": {"loss": _CRITERION, "scaler": torch.amp.GradScaler("cpu")},
}


@pytest.mark.parametrize("kind", _STEPS)
def test_the_peak_of_a_step_is_the_allocators(kind: str, made: Any) -> None:
    model, x, y = made
    given = dict(_STEPS[kind])
    batch = (x, y) if "step" in given else None
    if batch is None:
        given |= {"inputs": x, "targets": y}
    optimizer = given.pop("optimizer", None)
    cost = None if "autocast" in given else _COST  # oneDNN takes memory of its own in bfloat16: metered, not computed
    plan = recoup.plan(model, batch, budget="100%", cost=cost, optimizer=optimizer, actions=("recompute",), **given)
    evidence = recoup.verify(model, plan, batch, timed=False, optimizer=optimizer, **given)
    assert plan.predicted.plain_peak_bytes == pytest.approx(evidence.baseline_peak_bytes, rel=0.005)
    assert evidence.ok
    assert all(p.grad is None for p in model.parameters())


def test_training_in_ones_own_loop_is_the_same(made: Any) -> None:
    model, x, y = made
    twin = copy.deepcopy(model)
    recoup.fit(model, (x, y), step=_two_losses, budget="70%", timed=False)
    losses = []
    for net in (model, twin):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            loss = _two_losses(net, (x, y))
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


def _loader(x: torch.Tensor, y: torch.Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x, y: {"loss": _CRITERION, "step": _two_losses, "batch": x}, "not both"),
        (lambda x, y: {"inputs": x}, "all three"),
        (lambda x, y: {"inputs": x, "targets": y}, "all three"),
        (lambda x, y: {"targets": y, "batch": x}, "needs inputs"),
        (lambda x, y: {"inputs": x, "targets": y, "loss": _CRITERION, "batch": x}, "not both"),
        (lambda x, y: {}, "no batch"),
        (lambda x, y: {"batch": _loader(x, y)}, r"next\(iter\(loader\)\)"),
        (lambda x, y: {"batch": iter([x])}, r"next\(iter\(loader\)\)"),
        (lambda x, y: {"batch": x, "loss": 3}, "function of"),
        (lambda x, y: {"batch": x, "step": "train"}, "function of"),
        (lambda x, y: {"batch": x, "accumulate": 0}, "micro-batches"),
        (lambda x, y: {"batch": x, "autocast": "bf16"}, "torch.bfloat16"),
        (lambda x, y: {"batch": x, "scaler": 2.0}, "GradScaler"),
        (lambda x, y: {"batch": (x, y), "loss": lambda o, b: _CRITERION(o, b[1])}, "inputs="),
        (lambda x, y: {"batch": x, "step": lambda m, b: m(b).sum().backward()}, "return the scalar"),
    ],
)
def test_what_cannot_be_a_step_is_refused_in_one_line(make: Any, message: str, made: Any) -> None:
    model, x, y = made
    given = make(x, y)
    with pytest.raises(recoup.RecoupError, match=message) as caught:
        recoup.fit(model, given.pop("batch", None), budget="70%", **given)
    assert "\n" not in str(caught.value)
    assert all(p.grad is None for p in model.parameters())
