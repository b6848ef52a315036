"""The action `tile-modules` of the planner: found, priced, chosen, saved, shown, verified; measured as predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import recoup
from recoup.capture.capture import StepSpec
from recoup.cost.devices import get_device
from recoup.cost.measured import MeasuredCost
from recoup.cost.model import CostModel
from recoup.cost.roofline import RooflineCost
from recoup.engine.handle import apply_decisions
from recoup.evidence.verify import verify_plan
from recoup.export.left_out import left_out
from recoup.ir.plan import Decision, Plan
from recoup.planning import ACTIONS, Planner
from recoup.report.text import format_plan

OPT_IN = ("rederive", "recompute", "tile", "tile-modules")


def long_llama(dtype: torch.dtype = torch.float32, *, depth: int = 2, seq: int = 1024) -> tuple[nn.Module, Any]:
    """A Llama with a long sequence, batch 1, hidden 4x: gate, up and activation set the peak."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=depth, num_attention_heads=4
    )
    ids = torch.randint(0, 64, (1, seq))
    return hf.LlamaForCausalLM(config).to(dtype), {"input_ids": ids, "labels": ids}


def planner_for(model: nn.Module, batch: Any, actions: tuple[str, ...] = OPT_IN, *, measured: bool = False) -> Planner:
    cost: CostModel = RooflineCost(get_device("cpu-generic"))
    if measured:
        cost = MeasuredCost(torch.device("cpu"))
    return Planner(StepSpec(model=model, batch=batch), cost=cost, actions=actions, spans=False)


def tiles(depth: int = 2, tokens: int = 128) -> tuple[Decision, ...]:
    return tuple(
        Decision(path=f"model.layers.{i}.mlp", action="tile", tile_of="module", tile_tokens=tokens)
        for i in range(depth)
    )


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_measured_as_predicted(dtype: torch.dtype, bound: float) -> None:
    """The peak falls to the predicted byte, gradients stay within the class's bound, FLOPs are one forward more."""
    model, batch = long_llama(dtype)
    planner = planner_for(model, batch, ("rederive",), measured=True)
    candidate = planner.simulate(tiles())
    assert candidate.peak_bytes < 0.6 * planner.plain.peak_bytes
    plan = planner.plan(candidate, budget_bytes=candidate.peak_bytes, budget_text="-", device="cpu")
    evidence = verify_plan(model, plan, batch, timed=False)
    plain_gap = planner.plain.peak_bytes - (evidence.baseline_peak_bytes or 0)
    assert candidate.peak_bytes - evidence.peak_bytes == plain_gap  # what the meter leaves out of either
    assert 0 <= plain_gap <= 16384
    assert evidence.values_hold and evidence.max_gradient_error <= bound
    assert evidence.error_bound >= bound
    # One forward of each MLP: three products of 64 x 256 for 1024 positions, and as many pointwise numbers.
    products = 2 * 3 * 2 * 1024 * 64 * 256
    assert products <= candidate.recomputed_flops <= 1.02 * products


def test_found_and_proved() -> None:
    model, batch = long_llama()
    planner = planner_for(model, batch)
    assert planner.tiled_modules is not None
    assert [kind.name for kind in planner.tiled_modules.kinds] == ["model.layers.*.mlp"]
    kind = planner.tiled_modules.kinds[0]
    assert kind.paths == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert kind.input_bytes == 1024 * 64 * 4 and kind.inner_bytes == 16 * kind.input_bytes
    assert kind.tile_tokens(1024) == 64
    attention = planner.tiled_modules.refused["model.layers.0.self_attn"]
    assert "positions" in attention or "without data" in attention


def test_only_where_asked_for() -> None:
    model, batch = long_llama()
    assert "tile-modules" not in ACTIONS
    planner = planner_for(model, batch, ACTIONS)
    planner.smallest()
    assert all(d.tile_of == "loss" for c in planner.seen.values() for d in c.decisions)


@pytest.mark.slow
def test_reaches_lower_and_is_faster_there() -> None:
    model, batch = long_llama(depth=4)
    without, planner = planner_for(model, batch, ACTIONS), planner_for(model, batch)
    floor, lean = without.smallest(), planner.smallest()
    assert lean.peak_bytes < 0.75 * floor.peak_bytes
    for share in (1.02, 1.3, 2.0):
        budget = int(share * floor.peak_bytes)
        a, b = without.fit(budget), planner.fit(budget)
        assert a is not None and b is not None
        # A plan with tiles is taken only where it is faster by more than a fifth of a step.
        assert b.step_seconds <= a.step_seconds * 1.001
        assert b.peak_bytes <= budget


def test_plan_is_saved_shown_and_verified(tmp_path: Any) -> None:
    model, batch = long_llama()
    planner = planner_for(model, batch)
    candidate = planner.simulate((*(Decision(path="", action="rederive"),), *tiles()))
    plan = planner.plan(candidate, budget_bytes=candidate.peak_bytes, budget_text="-", device="cpu")
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert "tile model.layers.0-1.mlp by 128 tokens" in format_plan(again)
    assert any("2 modules run over tiles" in note for note in again.notes)
    assert any("modules over tiles" in sentence for sentence in left_out(again))
    applied = recoup.apply(model, again)
    assert "forward" in model.model.layers[0].mlp.__dict__
    applied.remove()
    assert "forward" not in model.model.layers[0].mlp.__dict__


def test_public_plan_takes_the_action() -> None:
    model, batch = long_llama()
    cost = RooflineCost(get_device("cpu-generic"))
    lean = planner_for(model, batch).smallest()
    plan = recoup.plan(model, batch, budget=int(1.05 * lean.peak_bytes), actions=OPT_IN, cost=cost)
    assert any(d.tile_of == "module" for d in plan.decisions)
    assert plan.predicted.peak_bytes <= plan.budget_bytes


def test_hooks_inside_rule_a_module_out() -> None:
    model, batch = long_llama()
    model.model.layers[1].mlp.act_fn = nn.SiLU()
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *a: None)
    planner = planner_for(model, batch)
    assert planner.tiled_modules is not None and planner.tiled_modules.kinds == ()
    assert "has a hook" in planner.tiled_modules.refused["model.layers.0.mlp"]


def test_dropout_rules_a_module_out() -> None:
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.1)
    ids = torch.randint(0, 64, (1, 256))
    planner = planner_for(hf.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, ("tile-modules",))
    assert planner.tiled_modules is not None
    assert all("mlp" not in kind.name or "c_" in kind.name or "act" in kind.name for kind in planner.tiled_modules.kinds)


def test_adapters_inside() -> None:
    """LoRA in the MLP: the adapters' gradients are summed over tiles, the frozen base gets none."""
    peft = pytest.importorskip("peft")
    model, batch = long_llama(seq=256)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up_proj", "down_proj"], lora_dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    path = "base_model.model.model.layers.{}.mlp"
    decisions = [Decision(path=path.format(i), action="tile", tile_of="module", tile_tokens=50) for i in range(2)]

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**batch).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    wanted = gradients()
    with apply_decisions(model, decisions):
        found = gradients()
    assert found.keys() == wanted.keys() and all("lora" in name for name in found)
    for name, gradient in found.items():
        assert (gradient - wanted[name]).norm() <= 1e-6 * wanted[name].norm()
