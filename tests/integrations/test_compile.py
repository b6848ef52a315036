"""torch.compile of a model with a plan: equal gradients, no more graph breaks than plain."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.cost.model import FlopsCost
from recoup.errors import BatchTooLarge, ConflictError
from recoup.integrations import distributed
from recoup.ir.decision import Recompute, Rederive
from recoup.runtime.apply import apply_decisions
from tests.models import make
from tests.thorough import cases

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def _vit(depth: int) -> tuple[nn.Module, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        num_hidden_layers=depth,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    return ViTForImageClassification(config).train(), batch


def _build(kind: str, depth: int = 2) -> tuple[nn.Module, Any]:
    model, batch = _vit(depth) if kind == "vit" else make(kind)[:2]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # a compiled region draws other random numbers than an eager one
    if kind == "gpt2":
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # without it transformers logs, a graph break
        model.transformer.h = model.transformer.h[:depth]  # type: ignore[union-attr, operator, index]
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
    "regions": lambda blocks: [Recompute(path=b) for b in blocks],
    "rederive": lambda blocks: [Rederive(path="")],
    "mixed": lambda blocks: [
        Rederive(path=""),
        Recompute(path=blocks[0], inside="rederive"),
    ],
}


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor], *, rtol: float, atol: float) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def _check(kind: str, name: str, backend: str, *, depth: int) -> None:
    """Gradients under a plan equal the compiled plain model's, and no graph breaks more."""
    model, batch = _build(kind, depth)
    plain = copy.deepcopy(model)
    expected = _gradients(plain, torch.compile(plain, backend=backend), batch)
    plain_breaks = _num_breaks()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with apply_decisions(model, PLANS[name](_blocks(model))):
        found = _gradients(model, torch.compile(model, backend=backend), batch)
    assert _num_breaks() <= plain_breaks == 0
    _equal(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kind", cases(["gpt2", "vit"], ["gpt2"]))
def test_aot_eager(kind: str, name: str) -> None:
    _check(kind, name, "aot_eager", depth=2)


@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a C++ compiler"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", cases(["gpt2", "vit"], ["vit"]))
def test_inductor(kind: str) -> None:
    _check(kind, "regions", "inductor", depth=1)


@pytest.mark.parametrize("kind", ["vit"])
def test_a_plan_on_a_compiled_model(kind: str) -> None:
    model, batch = _build(kind, 2)
    compiled = torch.compile(model, backend="aot_eager")
    expected = _gradients(model, compiled, batch)
    for step in ("planned", "planned again", "removed"):
        decisions = [] if step == "removed" else PLANS["regions"](_blocks(model))
        with apply_decisions(model, decisions):  # Dynamo sees the change and compiles again
            _equal(_gradients(model, compiled, batch), expected, rtol=1e-5, atol=1e-7)
    assert _num_breaks() == 0


def test_planning_a_compiled_model_is_refused_with_the_right_order() -> None:
    model, batch = _build("vit", 1)
    plan = recoup.plan(model, batch, budget="95%", cost=FlopsCost())
    assert plan.decisions
    compiled = torch.compile(model, backend="aot_eager")
    model.vit.layers[0].compile(backend="aot_eager")  # type: ignore[union-attr, index]
    for target, match in ((compiled, "OptimizedModule"), (model, "compiled in place")):
        for run in (
            lambda target=target: recoup.plan(target, batch, budget="90%"),
            lambda target=target: recoup.fit(target, batch, budget="90%"),
            lambda target=target: recoup.apply(target, plan),
        ):
            with pytest.raises(ConflictError, match=match) as caught:
                run()
            assert "Plan and apply on the bare model" in str(caught.value)
    model.vit.layers[0]._compiled_call_impl = None  # type: ignore[union-attr, index]
    expected = _gradients(model, compiled, batch)
    with distributed.apply(compiled, plan):
        _equal(_gradients(model, compiled, batch), expected, rtol=1e-5, atol=1e-7)
    with recoup.watch(compiled, budget="1GiB"):
        _equal(_gradients(model, compiled, batch), expected, rtol=1e-5, atol=1e-7)
    with recoup.watch(compiled, budget="100KiB"), pytest.raises(BatchTooLarge):
        compiled(**batch)
