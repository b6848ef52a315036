"""A head with a low-rank adapter (PEFT's LoRA on `lm_head`) runs over tiles: its products are added tile by tile."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import nn

from recoup.api import apply, plan
from recoup.cost.model import FlopsCost
from recoup.errors import UsageError
from recoup.evidence.verify import verify_plan
from recoup.ir.decision import TileLoss
from recoup.planner.strategies.registry import DEFAULT_ACTIONS
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions
from recoup.runtime.tile.loss.function import tiled_loss
from recoup.runtime.tile.loss.lazy_logits import LazyLogits
from recoup.runtime.tile.loss.math import LossSpec

V, PATH = 300, "base_model.model.lm_head"


def adapted(dtype: torch.dtype = torch.float64, *, layers: int = 1, vocabulary: int = V, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=vocabulary, **sizes)).to(dtype)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["lm_head", "q_proj"], **options)
    found: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return found.train()


def batch(tokens: int = 11) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, V, (2, tokens), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: nn.Module, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    output = model(**given)
    output.loss.backward()
    return output.loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, output


@pytest.mark.parametrize("tokens", [1, 6, 100])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_those_of_the_plain_loss(tokens: int, dropout: float) -> None:
    model = adapted(lora_dropout=dropout)
    loss, wanted, plain_output = step(model, batch())
    before = execution_context.tile_counters()
    with apply_decisions(model, [TileLoss(path=PATH, tile_tokens=tokens)]):
        tiled_loss_value, found, output = step(model, batch())
        after = execution_context.tile_counters()
        assert (after[0] - before[0], after[1] - before[1]) == (1, 0)
        assert isinstance(output.logits, LazyLogits)
        logits = output.logits.detach() + 0
        torch.testing.assert_close(logits, plain_output.logits.detach(), rtol=0, atol=0)
    # transformers takes the loss in float32 whatever the model is in
    torch.testing.assert_close(tiled_loss_value, loss, rtol=1e-6, atol=0)
    assert found.keys() == wanted.keys() and any("lm_head.lora_A" in n for n in found)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm(), name
    assert all("forward" not in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_added_products_exactly_in_float64(reduction: str) -> None:
    torch.manual_seed(0)
    hidden, weight, bias, a, b = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((23, 8), (50, 8), (50,), (23, 3), (50, 3))
    )
    labels = torch.randint(0, 50, (23,))
    labels[::5] = -100
    inputs = (hidden, weight, bias, a, b)
    upstream = torch.rand(23, dtype=torch.float64) if reduction == "none" else torch.tensor(1.7, dtype=torch.float64)
    spec = LossSpec(steps=(), ignore_index=-100, label_smoothing=0.1, reduction=reduction, tile_tokens=7)
    found = tiled_loss(hidden, weight, bias, [labels], spec, [(a, b)])
    logits = hidden @ weight.t() + bias + a @ b.t()
    wanted = nn.functional.cross_entropy(logits, labels, reduction=reduction, label_smoothing=0.1)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(found, inputs, upstream)
    plain = torch.autograd.grad(wanted, inputs, upstream)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_frozen_base_gets_no_gradient_and_a_merged_adapter_is_a_plain_head() -> None:
    model = adapted()
    with apply_decisions(model, [TileLoss(path=PATH, tile_tokens=6)]):
        step(model, batch())
        assert model.get_parameter(f"{PATH}.base_layer.weight").grad is None
        model.merge_adapter()
        before = execution_context.tile_counters()
        model(**batch())
        assert execution_context.tile_counters() == (before[0] + 1, before[1])


def test_found_by_the_planner_and_verified() -> None:
    model = adapted(torch.float32, layers=2, vocabulary=4000)
    given = batch(128)
    made = plan(model, given, budget="45%", device="cpu", cost=FlopsCost(), actions=DEFAULT_ACTIONS)
    assert [d.path for d in made.decisions if isinstance(d, TileLoss)] == [PATH]
    evidence = verify_plan(model, made, given, timed=False)
    assert evidence.exact and evidence.exactness == "rounding", evidence.differences
    assert evidence.peak_bytes == pytest.approx(made.predicted.peak_bytes, rel=0.01)
    apply(model, made).remove()


def test_other_modules_are_refused() -> None:
    model = adapted()
    with pytest.raises(UsageError, match="tiling needs"):
        apply_decisions(model, [TileLoss(path="base_model.model.model")])
