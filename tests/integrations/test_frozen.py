"""Frozen parameters: the set of parameters with a gradient is the same with and without a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.cost.model import FlopsCost
from recoup.ir.decision import Recompute
from recoup.runtime.apply import apply_decisions
from tests.models import Stack, make

pytest.importorskip("peft")


def lora() -> tuple[nn.Module, Any]:
    from peft import LoraConfig, get_peft_model

    model, batch, _ = make("gpt2")
    config = LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    return get_peft_model(model, config).train(), batch


def frozen_embeddings() -> tuple[nn.Module, Any]:
    model, batch, _ = make("llama")
    model.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]
    return model, batch


def bitfit() -> tuple[nn.Module, Any]:
    model, batch, _ = make("gpt2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model, batch


class Tower(nn.Module):
    """A frozen tower, and a trained stack on its output."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32))
        self.text = Stack()
        self.vision.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.text(self.vision(x))


def frozen_tower() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Tower(), torch.randn(64, 16)


def gradients(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    (output if isinstance(output, torch.Tensor) else output.loss).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.slow
@pytest.mark.parametrize("build", [lora, frozen_embeddings, bitfit, frozen_tower], ids=lambda f: f.__name__)
def test_same_parameters_get_a_gradient(build: Callable[[], tuple[nn.Module, Any]]) -> None:
    model, batch = build()
    expected = gradients(model, batch)
    assert 0 < len(expected) < len(list(model.parameters()))
    plan = recoup.plan(model, batch, budget="85%", cost=FlopsCost())
    assert plan.decisions
    with recoup.apply(model, plan):
        assert_same(gradients(model, batch), expected)


@pytest.mark.parametrize("build", [lora, frozen_embeddings, bitfit], ids=lambda f: f.__name__)
def test_every_block_a_region(build: Callable[[], tuple[nn.Module, Any]]) -> None:
    model, batch = build()
    expected = gradients(model, batch)
    blocks = [n for n, m in model.named_modules() if type(m).__name__ in ("GPT2Block", "LlamaDecoderLayer")]
    for inside in ("save", "rederive"):
        with apply_decisions(model, [Recompute(path=n, inside=inside) for n in blocks]):  # type: ignore[arg-type]
            assert_same(gradients(model, batch), expected)


def test_lora_saves_and_merges_under_a_plan(tmp_path: Any) -> None:
    from peft import PeftModel

    model, batch = lora()
    bare = copy.deepcopy(model)
    plan = recoup.plan(model, batch, budget="80%", cost=FlopsCost())
    assert plan.decisions
    with recoup.apply(model, plan):
        model.save_pretrained(tmp_path / "planned")  # type: ignore[operator]
    bare.save_pretrained(tmp_path / "plain")  # type: ignore[operator]
    names = sorted(p.name for p in (tmp_path / "planned").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "plain").iterdir())
    again = PeftModel.from_pretrained(make("gpt2")[0], tmp_path / "planned").eval()
    with torch.no_grad():
        assert torch.equal(again(**batch).loss, bare.eval()(**batch).loss)
