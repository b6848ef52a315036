"""A step is what the user says it is: his own loop, pairs, autocast, accumulation."""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
import xml.etree.ElementTree
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import recoup
from recoup.cost.devices import get_device
from recoup.cost.roofline import RooflineCost
from recoup.units import check_budget, format_bytes, parse_percent

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


def _plan(model: nn.Module, x: torch.Tensor, **given: Any) -> recoup.Plan:
    given = {"budget": "100%", "actions": ("recompute",), **given}
    return recoup.plan(model, x, loss=lambda out, _: out.float().square().mean(), cost=_COST, **given)


@pytest.mark.parametrize("differs", ["precision", "batch", "optimizer", "nothing"])
def test_a_training_step_that_is_not_the_planned_one_is_said_once(differs: str, made: Any) -> None:
    model, x, _ = made
    optimizer = torch.optim.Adam(model.parameters())
    given = {} if differs == "optimizer" else {"optimizer": torch.optim.Adam}
    plan = _plan(model, x[:64] if differs == "batch" else x, budget="min", **given)
    plan = dataclasses.replace(plan, budget_bytes=1 << 40)  # whatever comes fits
    with recoup.apply(model, plan), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", recoup.OtherStepWarning)
        for _ in range(5):
            with torch.autocast("cpu", torch.bfloat16, enabled=differs == "precision"):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    texts = [str(w.message) for w in caught if w.category is recoup.OtherStepWarning]
    words = {
        "precision": "bfloat16, planned was float32",
        "batch": "16.0 KiB, planned were 8.0 KiB",
        "optimizer": "planned were 0 B",
    }
    assert len(texts) == (differs != "nothing")
    assert not texts or words[differs] in texts[0]


def test_the_smallest_budget_has_a_name_and_a_bare_number_is_asked_about(made: Any) -> None:
    model, x, _ = made
    least = _plan(model, x, budget="min")
    assert least.predicted.peak_bytes == least.budget_bytes < least.predicted.plain_peak_bytes
    with pytest.raises(recoup.InfeasibleBudget, match=r"% of plain\).*at least \d+KiB") as caught:
        _plan(model, x, budget=least.budget_bytes - 1)
    assert caught.value.minimum_bytes == least.budget_bytes
    with pytest.raises(recoup.InfeasibleBudget, match=r"of plain\) with tile alone.*, more actions,"):
        _plan(model, x, budget=least.budget_bytes, actions=("tile",))
    with pytest.raises(recoup.UsageError, match="bytes or per cent"):
        _plan(model, x, budget="60")
    with pytest.raises(recoup.UsageError, match=r"'60': bytes\? Write a unit"):
        _plan(model, x, budget="60%", actions=("offload",), host_budget="60")
    with pytest.raises(recoup.UsageError, match="no_grad"), torch.no_grad():
        _plan(model, x)
    assert any("eval mode" in note for note in _plan(model.eval(), x).notes)


@pytest.mark.parametrize("text", ["60", "6_0", " 99.5", "0.6", "0.0625", "101", "1_000_000"])
def test_what_a_bare_number_is_answered_with_can_be_written(text: str) -> None:
    with pytest.raises(recoup.UsageError, match="bytes") as caught:
        check_budget(text)
    written = re.findall("'([^']*)'", str(caught.value))[1:]
    assert len(written) >= 2 and not any("e+" in one or one[:1] == " " for one in written)
    for one in written:
        check_budget(one)
        assert not one.endswith("%") or parse_percent(one) <= 100


@pytest.mark.parametrize("text", ["1__0GiB", "1_GiB", "_1GiB", "9" * 400, "9" * 308 + "GiB"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(recoup.UsageError, match="'8GiB', '750MiB'"):
        check_budget(text)


def test_values_show_themselves_in_a_notebook(made: Any) -> None:
    model, x, y = made
    curve = recoup.frontier(model, x, num_points=2, cost=_COST, actions=("recompute",))
    fit = recoup.fit(model, inputs=x, targets=y, loss=_CRITERION, budget="80%", timed=False)
    fit.applied.remove()
    for value in (fit, fit.plan, fit.evidence, recoup.profile(model, x, cost=_COST), curve):
        page = value._repr_html_()
        assert len(repr(value)) < 200
        assert "object at 0x" not in repr(value)
        xml.etree.ElementTree.fromstring(page.replace("&#9632;", ""))  # every tag is closed, every text escaped
    assert format_bytes(fit.evidence.peak_bytes) in fit._repr_html_()
    assert "removed" in repr(fit.applied)
