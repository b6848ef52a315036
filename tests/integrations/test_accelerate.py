"""The real Accelerator: plan before or after `prepare`, in its precision."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from recoup.engine.handle import plain
from recoup.errors import ConflictError
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


def test_the_plugins_checkpointing_is_refused() -> None:
    model, batch, _ = make("llama")
    plugin = SimpleNamespace(activation_checkpointing=True)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    with pytest.raises(ConflictError, match="fsdp_activation_checkpointing"):
        integration.fit(accelerator, model, batch, budget="80%")  # type: ignore[arg-type]
