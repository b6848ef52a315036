"""plan, fit, verify, profile, frontier, max_batch as a user calls them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from recoup.cost.model import FlopsCost
from tests.models import KINDS, make, same, step

_LARGE = ("gpt2", "llama")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k in _LARGE else k for k in KINDS])
def test_no_plan_is_over_its_budget(kind: str) -> None:
    model, batch, loss = make(kind)
    planned = 0
    for budget in ("100%", "90%", "80%", "70%", "60%"):
        try:
            plan = recoup.plan(model, batch, loss=loss, budget=budget, cost=FlopsCost())
        except recoup.InfeasibleBudget:
            break
        assert plan.predicted.peak_bytes <= plan.budget_bytes
        assert (plan.decisions == ()) == (budget == "100%")
        planned += 1
    assert planned > 1


@pytest.mark.parametrize("actions", [("recompute",), ("rederive", "recompute")])
@pytest.mark.parametrize("kind", ["stack", "gpt2"])
def test_fit_proves_it(kind: str, actions) -> None:
    model, batch, loss = make(kind)
    expected = step(make(kind)[0], batch, loss)
    fit = recoup.fit(model, batch, loss=loss, budget="75%", actions=actions, timed=False)
    assert fit.evidence.ok, str(fit)
    assert fit.evidence.peak_bytes == pytest.approx(fit.plan.predicted.peak_bytes, rel=0.03)
    assert fit.evidence.num_regions_replayed + fit.evidence.num_rederived > 0
    assert "within the budget" in str(fit)
    assert same(step(model, batch, loss), expected)
    fit.applied.remove()


@pytest.mark.slow
def test_an_impossible_budget_names_the_floor_and_the_floor_works() -> None:
    model, batch, _ = make("gpt2")
    with pytest.raises(recoup.InfeasibleBudget) as caught:
        recoup.plan(model, batch, budget=1000, cost=FlopsCost())
    error = caught.value
    assert error.phase in ("forward", "loss", "backward", "replay", "optimizer")
    assert error.tensors
    assert "smallest reachable peak" in str(error)
    plan = recoup.plan(model, batch, budget=error.minimum_bytes, cost=FlopsCost())
    assert plan.predicted.peak_bytes <= error.minimum_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": "8 bananas"}, "8 bananas"),
        ({"budget": -1}, "positive"),
        ({"budget": "0%"}, "positive"),
        ({"budget": True}, "budget"),
        ({"device": "h9000"}, "Unknown device"),
        ({"device": "cuda"}, "there is none"),
        ({"actions": ("magic",)}, "Unknown action"),
        ({"optimizer": "adam"}, "optimizer must be"),
        ({"loss": 3}, "loss must be"),
        ({"model": 3}, "torch.nn.Module"),
        ({"model": nn.ReLU()}, "no parameters"),
        ({"batch": torch.randn(2, 3)}, "failed on this batch"),
    ],
)
def test_bad_input_changes_nothing(change, message: str) -> None:
    if change.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model, batch, _ = make("stack")
    before = [id(p) for p in model.parameters()]
    call = {"model": model, "batch": batch, "budget": "70%", "cost": FlopsCost(), **change}
    with pytest.raises(recoup.UsageError, match=message):
        recoup.plan(call.pop("model"), call.pop("batch"), **call)
    assert [id(p) for p in model.parameters()] == before


@pytest.mark.slow
def test_plans_for_a_gpu_that_is_elsewhere() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(num_hidden_layers=4, hidden_size=256, intermediate_size=1024, vocab_size=500)
        ).train()
    ids = torch.zeros(8, 512, dtype=torch.long)
    plan = recoup.plan(
        model, {"input_ids": ids, "labels": ids}, budget="85%", optimizer=torch.optim.AdamW, device="a100-80gb"
    )
    assert plan.device == "a100-80gb"
    assert plan.predicted.peak_bytes <= plan.budget_bytes
    assert "roofline" in plan.predicted.cost_source
    with pytest.raises(recoup.UsageError, match="meta"):
        recoup.verify(model, plan, {"input_ids": ids, "labels": ids})


@pytest.mark.slow
def test_profile_and_frontier_print() -> None:
    model, batch, _ = make("llama")
    profile = recoup.profile(model, batch, cost=FlopsCost())
    assert sum(size for _, size in profile.at_peak) == profile.peak_bytes
    assert profile.rows[0].saved_bytes <= profile.saved_bytes
    text = str(profile)
    assert all(len(line) <= 100 for line in text.splitlines())
    model, batch, _ = make("stack")
    curve = recoup.frontier(model, batch, cost=FlopsCost(), num_points=5)
    assert [p.peak_bytes for p in curve.points] == sorted(p.peak_bytes for p in curve.points)
    seconds = [p.step_seconds for p in curve.points]
    assert seconds == sorted(seconds, reverse=True)
    assert str(curve)


def test_the_optimizer_counts() -> None:
    model, batch, _ = make("stack")
    without = recoup.plan(model, batch, budget="100%", cost=FlopsCost())
    with_adam = recoup.plan(model, batch, budget="100%", optimizer=torch.optim.Adam, cost=FlopsCost())
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert with_adam.predicted.plain_peak_bytes >= without.predicted.plain_peak_bytes + 2 * weights
    optimizer = torch.optim.Adam(model.parameters())
    fit = recoup.fit(model, batch, budget="95%", optimizer=optimizer, timed=False)
    assert fit.evidence.within_budget
    assert not optimizer.state  # the user's own optimizer was not stepped
