"""The real Accelerator: plan before or after `prepare`, in its precision."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from recoup.errors import ConflictError, OverBudgetWarning
from recoup.ir.decision import Rederive, Save
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions, find_patches, plain
from recoup.runtime.conflicts import refuse_conflicts
from tests.models import make

accelerate = pytest.importorskip("accelerate")

from recoup.integrations import accelerate as integration  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def _train(accelerator: Any, model: nn.Module, optimizer: Any, batch: Any) -> list[torch.Tensor]:
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("order", "precision"), [("before", "bf16"), ("after", "no"), ("after", "bf16")])
def test_plan_before_and_after_prepare(order: str, precision: str) -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model, batch, _ = make("llama")
    twin = copy.deepcopy(model)
    expected = _train(accelerator, *accelerator.prepare(twin, torch.optim.AdamW(twin.parameters())), batch)
    optimizer = torch.optim.AdamW(model.parameters())
    if order == "after":
        model, optimizer = accelerator.prepare(model, optimizer)
    fit = integration.fit(accelerator, model, batch, budget="80%", optimizer=optimizer)
    assert fit.evidence.ok
    assert fit.plan.decisions
    if order == "before":
        model, optimizer = accelerator.prepare(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(_train(accelerator, model, optimizer, batch), expected, strict=True))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
    with plain(model), torch.no_grad():
        assert torch.isfinite(model(**batch).loss)


@pytest.fixture
def prepared() -> Any:
    """A bf16 accelerator, and a plan at the model itself that was in place before `prepare` wrapped its forward."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model, batch, _ = make("llama")
    applied = apply_decisions(model, [Rederive(path=""), Save(path="model.norm")])
    return accelerator, accelerator.prepare(model), batch, applied


def _num_rederived(model: nn.Module, batch: Any) -> int:
    before = execution_context.counters()[1]
    model(**batch).loss.backward()
    return execution_context.counters()[1] - before


def test_a_plan_at_the_model_itself_runs_after_prepare(prepared: Any) -> None:
    accelerator, model, batch, applied = prepared
    assert [patch.settings.path for patch in find_patches(model)] == ["", "model.norm"]
    assert _num_rederived(model, batch) > 10
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert _num_rederived(unwrapped, batch) > 10
    applied.remove()
    assert _num_rederived(unwrapped, batch) == 0
    assert not find_patches(model)
    refuse_conflicts(model)


def test_a_prepared_model_is_copied_with_its_plan(prepared: Any) -> None:
    _, model, batch, applied = prepared
    twin = copy.deepcopy(model)
    assert _num_rederived(twin, batch) > 10
    assert all(p.grad is None for p in model.parameters())  # the copy ran, not the model it was copied from
    root, inner = find_patches(twin)
    assert root.module is twin
    assert root.settings.state is inner.settings.state
    applied.remove()
    assert _num_rederived(model, batch) == 0
    assert _num_rederived(twin, batch) > 10


def test_a_copy_outlives_the_prepared_model(prepared: Any) -> None:
    model, batch = prepared[1:3]
    twin = copy.deepcopy(model)
    for patched in find_patches(model):  # accelerate holds the model itself
        patched._module = lambda: None  # type: ignore[assignment,return-value]
    assert _num_rederived(twin, batch) > 10


def test_the_plugins_checkpointing_is_refused() -> None:
    model, batch, _ = make("llama")
    plugin = SimpleNamespace(activation_checkpointing=True)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    with pytest.raises(ConflictError, match="fsdp_activation_checkpointing"):
        integration.fit(accelerator, model, batch, budget="80%")  # type: ignore[arg-type]


def test_accumulation_is_planned() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, batch, _ = make("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    found = integration.fit(accelerator, model, batch, budget="70%", optimizer=optimizer)
    assert found.plan.decisions
    model, optimizer = accelerator.prepare(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", category=OverBudgetWarning)
        for _ in range(8):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
