"""The meter counts what the step allocates, whatever else is freed meanwhile."""

from __future__ import annotations

import gc

import torch
from torch import nn

import recoup
from recoup.evidence.memory import measure_peak

CPU = torch.device("cpu")


class _Cycle:
    def __init__(self, num_bytes: int) -> None:
        self.itself, self.tensor = self, torch.empty(num_bytes, dtype=torch.uint8)


def test_garbage_of_an_earlier_step_that_goes_in_this_one_lowers_no_peak() -> None:
    def step() -> None:
        tensors = [torch.empty(1_000_000, dtype=torch.uint8)]
        gc.collect()
        tensors.append(torch.empty(1_000_000, dtype=torch.uint8))

    assert measure_peak(lambda: _Cycle(5_000_000) and None, device=CPU, held_bytes=0) == 5_000_000
    assert measure_peak(step, device=CPU, held_bytes=0) == 2_000_000


def test_an_input_that_the_step_makes_is_let_go_where_the_step_lets_it_go() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.Softplus())))
    batch = torch.randn(512, 32)

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch.clone().requires_grad_()).square().mean()
        return loss

    plan = recoup.plan(model, batch, step=step, budget="min")
    evidence = recoup.verify(model, plan, batch, step=step, timed=False)
    held = sum(p.nbytes for p in model.parameters()) + batch.nbytes
    measured = measure_peak(lambda: step(model, batch).backward(), device=CPU, held_bytes=held)
    assert evidence.baseline_peak_bytes == measured == plan.predicted.plain_peak_bytes
    assert evidence.ok and evidence.peak_bytes == plan.predicted.peak_bytes


def test_a_tensor_outside_of_the_model_that_gets_a_gradient_is_left_as_it_was() -> None:
    model, batch, scale = nn.Linear(8, 8), torch.randn(64, 8), torch.ones(8, requires_grad=True)
    scale.grad = torch.full((8,), 3.0)
    recoup.fit(model, batch, loss=lambda output, batch: (output * scale).sum(), budget="100%", timed=False)
    assert scale.grad is not None and torch.equal(scale.grad, torch.full((8,), 3.0))
