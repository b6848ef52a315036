"""torch.compile of a model with a plan: equal gradients, no more graph breaks than plain."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from recoup.engine.handle import apply_decisions
from recoup.ir.plan import Decision
from tests.models import make

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _vit() -> tuple[nn.Module, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, image_size=32, patch_size=8
    )
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    return ViTForImageClassification(config).train(), batch


def _build(kind: str) -> tuple[nn.Module, Any]:
    model, batch = _vit() if kind == "vit" else make(kind)[:2]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # a compiled region draws other random numbers than an eager one
    if kind == "gpt2":
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # without it transformers logs, a graph break
        model.transformer.h = model.transformer.h[:2]  # type: ignore[union-attr, operator, index]
    return model, batch


def _blocks(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if type(m).__name__ in ("GPT2Block", "ViTLayer")]


def _gradients(model: nn.Module, run: Any, batch: Any) -> list[torch.Tensor]:
    model.zero_grad()
    run(**batch).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _num_breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


PLANS = {
    "regions": lambda blocks: [Decision(path=b, action="recompute") for b in blocks],
    "rederive": lambda blocks: [Decision(path="", action="rederive")],
    "mixed": lambda blocks: [
        Decision(path="", action="rederive"),
        Decision(path=blocks[0], action="recompute", inside="rederive"),
    ],
}


@pytest.mark.parametrize(("kind", "name"), [("gpt2", "regions"), ("gpt2", "mixed"), ("vit", "mixed")])
def test_aot_eager(kind: str, name: str) -> None:
    model, batch = _build(kind)
    plain = copy.deepcopy(model)
    expected = _gradients(plain, torch.compile(plain, backend="aot_eager"), batch)
    plain_breaks = _num_breaks()
    torch.compiler.reset()
    decisions = PLANS[name](_blocks(model))
    with apply_decisions(model, decisions):
        found = _gradients(model, torch.compile(model, backend="aot_eager"), batch)
    assert _num_breaks() - plain_breaks <= plain_breaks == 0
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_plan_on_a_compiled_model() -> None:
    model, batch = _build("vit")
    compiled = torch.compile(model, backend="aot_eager")
    expected = _gradients(model, compiled, batch)
    with apply_decisions(model, PLANS["regions"](_blocks(model))):  # Dynamo sees the change and compiles again
        found = _gradients(model, compiled, batch)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor() -> None:
    model, batch = _build("gpt2")
    model.transformer.h = model.transformer.h[:1]  # type: ignore[union-attr, operator, index]
    expected = _gradients(model, model, batch)
    with apply_decisions(model, PLANS["regions"](_blocks(model))):
        found = _gradients(model, torch.compile(model), batch)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
