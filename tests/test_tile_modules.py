"""The action `tile-modules` of the planner: found, priced, chosen, saved, shown, verified; measured as predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import recoup
from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.cost.devices import get_device
from recoup.cost.measured import MeasuredCost
from recoup.cost.model import CostModel
from recoup.cost.roofline import RooflineCost
from recoup.evidence.verify import verify_plan
from recoup.export.left_out import left_out
from recoup.ir.decision import Decision, Rederive, TileLoss, TileModule
from recoup.ir.plan import Plan
from recoup.planner.driver import Planner
from recoup.planner.strategies.registry import DEFAULT_ACTIONS, OPT_IN_ACTIONS
from recoup.planner.strategies.tile import TiledModules, find_tiled_modules, is_tiled
from recoup.planner.strategies.tile_search import TileStrategy
from recoup.runtime.apply import apply_decisions

OPT_IN = ("rederive", "recompute", "tile-modules")


def long_llama(dtype: torch.dtype = torch.float32, *, depth: int = 2, seq: int = 1024) -> tuple[nn.Module, Any]:
    """A Llama with a long sequence, batch 1, hidden 4x: gate, up and activation set the peak."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=depth, num_attention_heads=4
    )
    ids = torch.randint(0, 64, (1, seq))
    return hf.LlamaForCausalLM(config).to(dtype), {"input_ids": ids, "labels": ids}


def planner_for(model: nn.Module, batch: Any, actions: tuple[str, ...], *, measured: bool = False) -> Planner:
    cost: CostModel = RooflineCost(get_device("cpu-generic"))
    if measured:
        cost = MeasuredCost(torch.device("cpu"))
    return Planner(StepSpec(model=model, batch=batch), cost=cost, actions=actions, spans=False)


@pytest.fixture(scope="module")
def planned() -> tuple[nn.Module, Any, Planner]:
    model, batch = long_llama()
    return model, batch, planner_for(model, batch, OPT_IN)


def found_in(model: nn.Module, batch: Any) -> TiledModules:
    spec = StepSpec(model=model, batch=batch)
    trace = capture(spec)
    return find_tiled_modules(spec, trace, peak_bytes=max(trace.levels()))


def tiles(depth: int = 2, tokens: int = 128) -> tuple[Decision, ...]:
    return tuple(TileModule(path=f"model.layers.{i}.mlp", tile_tokens=tokens) for i in range(depth))


@pytest.mark.slow
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_measured_as_predicted(dtype: torch.dtype, bound: float) -> None:
    """The peak falls to the predicted byte, gradients stay within the class's bound, FLOPs are one forward more."""
    model, batch = long_llama(dtype)
    planner = planner_for(model, batch, (), measured=True)
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
    found = found_in(*long_llama())
    assert [kind.name for kind in found.kinds] == ["model.layers.*.mlp"]
    kind = found.kinds[0]
    assert kind.paths == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert kind.input_bytes == 1024 * 64 * 4 and kind.inner_bytes == 16 * kind.input_bytes
    assert kind.tile_tokens(1024) == 64


def test_only_where_asked_for() -> None:
    assert "tile-modules" not in DEFAULT_ACTIONS and "tile-modules" in OPT_IN_ACTIONS
    model, batch = long_llama(seq=256)
    planner = planner_for(model, batch, ("tile",))
    tiles = planner.strategy(TileStrategy)
    assert tiles is not None and tiles.found.modules is None
    assert all(isinstance(d, TileLoss) for c in planner.simulated.values() for d in c.decisions)


def test_plan_is_saved_shown_applied(planned: tuple[nn.Module, Any, Planner], tmp_path: Any) -> None:
    model, _, planner = planned
    candidate = planner.simulate((Rederive(path=""), *tiles()))
    plan = planner.plan(candidate, budget_bytes=candidate.peak_bytes, budget_text="-", device="cpu")
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert "tile model.layers.0-1.mlp by 128 tokens" in str(again)
    assert any("2 modules run over tiles" in note for note in again.notes)
    assert any("modules over tiles" in sentence for sentence in left_out(again))
    applied = recoup.apply(model, again)
    assert "forward" in model.model.layers[0].mlp.__dict__
    applied.remove()
    assert "forward" not in model.model.layers[0].mlp.__dict__


@pytest.mark.slow
def test_planner_reaches_lower_and_keeps_to_equal_bits_where_it_can(planned: tuple[nn.Module, Any, Planner]) -> None:
    _, _, planner = planned
    lean = planner.smallest()
    floor = min(c.peak_bytes for c in planner.simulated.values() if not is_tiled(c.decisions))
    assert lean.peak_bytes < 0.8 * floor
    for share in (1.05, 1.3):
        found = planner.fit(int(share * lean.peak_bytes))
        assert found is not None and found.peak_bytes <= share * lean.peak_bytes
        assert any(isinstance(d, TileModule) for d in found.decisions)
        assert not any(d.path.startswith("model.layers.0.mlp.") for d in found.decisions)
    loose = planner.fit(int(0.9 * planner.plain.peak_bytes))
    assert loose is not None and not is_tiled(loose.decisions)


def test_no_more_modules_are_tiled_than_the_budget_needs() -> None:
    model, batch = long_llama(depth=3, seq=256)
    planner = planner_for(model, batch, ("tile-modules",))
    one = planner.simulate(tiles(3, tokens=64)[2:])
    assert one.peak_bytes < 0.9 * planner.plain.peak_bytes
    found = planner.fit(one.peak_bytes)
    assert found is not None and found.peak_bytes <= one.peak_bytes
    assert [d.path for d in found.decisions if isinstance(d, TileModule)] == ["model.layers.2.mlp"]


@pytest.mark.slow
def test_public_plan_explained() -> None:
    model, batch = long_llama(seq=512)
    cost = RooflineCost(get_device("cpu-generic"))
    frontier = recoup.frontier(model, batch, actions=OPT_IN, cost=cost, num_points=2)
    budget = int(1.1 * frontier.points[0].peak_bytes)
    plan = frontier.plan(budget)
    assert any(isinstance(d, TileModule) for d in plan.decisions)
    assert plan.predicted.peak_bytes <= plan.budget_bytes
    choices = [price.choice for price in frontier.explain(budget).prices]
    assert any("tile model.layers.0-1.mlp" in choice for choice in choices)


class Mixed(nn.Module):
    """Draws nothing and changes nothing, but each position reads those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x).cumsum(1).exp().mean(-1, keepdim=True) * x


def test_a_module_that_mixes_positions_is_ruled_out_with_the_op() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Mixed(), nn.Linear(16, 1))
    found = found_in(model, torch.randn(1, 300, 16))
    assert "`cumsum` works along the positions" in found.refused["1"]
    assert "1" not in [path for kind in found.kinds for path in kind.paths]


def test_hooks_inside_rule_a_module_out() -> None:
    model, batch = long_llama(seq=256)
    model.model.layers[1].mlp.act_fn = nn.SiLU()
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *a: None)
    found = found_in(model, batch)
    assert found.kinds == () and "has a hook" in found.refused["model.layers.0.mlp"]


def test_dropout_rules_a_module_out() -> None:
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.1)
    ids = torch.randint(0, 64, (1, 256))
    batch = {"input_ids": ids, "labels": ids}
    assert "transformer.h.*.mlp" not in [k.name for k in found_in(hf.GPT2LMHeadModel(config), batch).kinds]
    config.resid_pdrop = 0.0
    assert "transformer.h.*.mlp" in [k.name for k in found_in(hf.GPT2LMHeadModel(config), batch).kinds]


def test_adapters_inside() -> None:
    """LoRA in the MLP: the adapters' gradients are summed over tiles, the frozen base gets none."""
    peft = pytest.importorskip("peft")
    model, batch = long_llama(seq=256)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up_proj", "down_proj"], lora_dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    path = "base_model.model.model.layers.{}.mlp"
    decisions = [TileModule(path=path.format(i), tile_tokens=50) for i in range(2)]

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
