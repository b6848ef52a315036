"""Kernels that add in any order, as atomics on a GPU do: what is plain's noise, and what is a plan's fault."""

from __future__ import annotations

import queue
from typing import Any

import torch
from torch import nn

import recoup
from recoup import _torch
from recoup.ir.decision import Recompute
from recoup.runtime import execution_context
from tests.evidence.test_verify import _plan

_runs: queue.SimpleQueue[int] = queue.SimpleQueue()  # what nobody can put back


class _Atomic(torch.autograd.Function):
    """Its gradient is another each time, but where kernels have to be deterministic."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, has_other: bool) -> torch.Tensor:
        ctx.has_other = has_other
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if torch.are_deterministic_algorithms_enabled():
            if not ctx.has_other:
                raise RuntimeError("atomic has no such kernel, but you set 'torch.use_deterministic_algorithms(True)'")
            return gradient, None
        _runs.put(1)
        return gradient * (1 + 1e-6 * _runs.qsize()), None


class _Layer(nn.Module):
    def __init__(self, *, has_other: bool = True, lies: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.has_other, self.lies = nn.Linear(32, 64), nn.Linear(64, 32), has_other, lies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(_Atomic.apply(x, self.has_other))
        if self.lies and execution_context.is_recomputing():
            y = y + torch.zeros_like(y).index_fill_(
                0, torch.tensor([5]), 1e-3
            )  # where no byte is looked at in training
        return self.down(torch.tanh(y))


def _model(**kwargs: bool) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(_Layer(**kwargs) for _ in range(3)), nn.Linear(32, 1)), torch.randn(256, 32)


def test_a_plan_is_proved_where_plain_steps_differ_and_a_wrong_one_is_found() -> None:
    model, x = _model()
    plan = _plan(model, x, Recompute(path="0"), Recompute(path="1"))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        steps = _runs.qsize()
        recoup.verify(model, plan, x, timed=False)
        assert _runs.qsize() == steps, "deterministic already"
        torch.use_deterministic_algorithms(False, warn_only=True)
        before = _torch.deterministic_mode()
        found = recoup.verify(model, plan, x, timed=False)
        assert _torch.deterministic_mode() == before
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.ok and found.gradients_equal and found.plain_repeats and found.error_bound == 0
    assert found.num_regions_replayed == 2
    assert any("holds under torch.use_deterministic_algorithms(True)" in n for n in found.notes)
    model, x = _model(lies=True)
    found = recoup.verify(model, _plan(model, x, Recompute(path="1")), x, timed=False)
    assert not found.ok and found.plain_repeats and not found.replays_equal
    assert found.regions_diverged == ("1",)


def test_a_step_without_deterministic_kernels_is_compared_with_plains_own_noise() -> None:
    model, x = _model(has_other=False)
    found = recoup.verify(model, _plan(model, x, Recompute(path="1")), x, timed=False)
    assert not found.plain_repeats and not found.gradients_equal and 0 < found.max_gradient_error <= found.error_bound
    assert any("does not run: atomic has no such kernel" in n for n in found.notes)
    assert not _torch.deterministic_mode()[0]
