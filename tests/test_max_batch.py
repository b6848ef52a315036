"""max_batch against the meter: the size it returns measures within the budget, and nothing is left changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.capture.step import Objective
from recoup.evidence.memory import measure_peak
from recoup.evidence.step_bench import StepBench
from recoup.runtime.apply import apply_decisions
from tests.models import ConvNet, Stack
from tests.thorough import cases

_MIB = 2**20


class _Unrolled(nn.Module):
    """An LSTM cell in a loop: what grows may be the batch or the number of steps."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[0], x.shape[2])
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return self.head(h).square().mean()


class _Image(nn.Module):
    """A small convolutional network with a scalar out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ConvNet()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=160, num_attention_heads=2, vocab_size=256
    )
    return LlamaForCausalLM(config).train()


def _tokens(batch: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(batch * length).reshape(batch, length) % vocabulary
    return {"input_ids": ids, "labels": ids}


# Model, a batch of a size, budget in MiB, what grows.
_CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], float]] = {
    "residual blocks with dropout, examples": (lambda: Stack(depth=3), lambda n: torch.ones(64 * n, 32), 0.9),
    "convolutions, pixels": (_Image, lambda n: torch.ones(2, 3, 16 * n, 32), 1.2),
    "BatchNorm blocks, examples": (lambda: Stack(depth=3, batch_norm=True), lambda n: torch.ones(64 * n, 32), 0.9),
    "llama, sequence length": (_llama, lambda n: _tokens(2, 32 * n, 256), 1.7),
    "LSTM cell, steps": (_Unrolled, lambda n: torch.ones(64, 2 * n, 32), 0.35),
}


def _measure(model: nn.Module, batch: Any, plan: recoup.Plan, optimizer: Any) -> int:
    bench = StepBench(model, batch, Objective(), optimizer)
    with apply_decisions(model, plan.decisions):
        bench.step()
        bench.restore()
        peak = measure_peak(bench.step, device=bench.device, held_bytes=bench.held_bytes())
    bench.restore()
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(_CASES, list(_CASES)[:2]))
def test_the_returned_size_measures_within_the_budget_and_the_next_does_not_fit(case: str) -> None:
    make_model, make_batch, budget_mib = _CASES[case]
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    budget = int(budget_mib * _MIB)
    weights = copy.deepcopy(model.state_dict())
    stream = torch.get_rng_state()
    step: dict[str, Any] = {"optimizer": optimizer, "actions": ("rederive", "recompute")}
    size = recoup.max_batch(model, make_batch, budget=budget, **step)
    assert torch.equal(torch.get_rng_state(), stream)
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert model.training
    assert 1 < size < 1 << 10
    plan = recoup.plan(model, make_batch(size), budget=budget, **step)
    assert _measure(model, make_batch(size), plan, optimizer) <= budget
    with pytest.raises(recoup.InfeasibleBudget) as caught:
        recoup.plan(model, make_batch(size + 1), budget=budget, **step)
    least = recoup.plan(model, make_batch(size + 1), budget=caught.value.minimum_bytes, **step)
    assert _measure(model, make_batch(size + 1), least, optimizer) > budget
