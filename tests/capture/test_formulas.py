"""Autograd's formulas that write in place on real tensors do so in a captured step: no more bytes than measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.evidence.memory import measure_peak, storage_bytes
from recoup.ir.trace import Trace

ROWS, WIDTH = 1 << 11, 128
AT = torch.arange(64) * 7
FEW = AT[:, None].expand(64, WIDTH).contiguous()
READ: dict[str, Callable[[Tensor], Tensor]] = {
    "gather": lambda h: h.gather(0, FEW),
    "index": lambda h: h[AT],
    "index_select": lambda h: h.index_select(0, AT),
    "sort": lambda h: h.sort(0).values[:9],
    "max": lambda h: h.max(0).values,
    "cummax": lambda h: h.cummax(0).values[-1],
    "take": lambda h: h.take(AT),
}


class Reads(nn.Module):
    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.read = nn.Parameter(torch.ones(WIDTH)), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x * self.weight).square().sum()


def captured(model: nn.Module, x: Tensor) -> Trace:
    return capture(StepSpec(model=model, batch=(x,), objective=Objective(loss=lambda output, _: output)))


@pytest.mark.parametrize("name", READ)
def test_the_peak_is_that_of_a_real_step(name: str) -> None:
    torch.manual_seed(0)
    model, x = Reads(READ[name]), torch.randn(ROWS, WIDTH)
    model(x).backward()
    model.zero_grad()
    held = storage_bytes([model.weight, x, AT, FEW])
    measured = measure_peak(lambda: model(x).backward(), device=torch.device("cpu"), held_bytes=held)
    trace = captured(model, x)
    assert max(trace.levels([0] * len(trace.ops))) == pytest.approx(measured, rel=0.04)


class Asks(nn.Module):
    """A model that looks at a value: fake tensors cannot follow it, a real step is run."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found * 2 if found.detach().sum().item() == 0.125 else found


@pytest.mark.parametrize("name", READ)
def test_the_peak_of_a_step_that_is_captured_for_real_is_that_of_a_step(name: str) -> None:
    torch.manual_seed(0)
    model, x = Asks(Reads(READ[name])), torch.randn(ROWS, WIDTH)
    evidence = recoup.verify(model, recoup.plan(model, x, budget="100%"), x, timed=False)
    plan = recoup.plan(model, x, budget="100%")
    assert any("real step" in note for note in plan.notes)
    assert plan.predicted.plain_peak_bytes == pytest.approx(evidence.baseline_peak_bytes, rel=0.01)


@pytest.mark.parametrize("criterion", [nn.functional.mse_loss, nn.functional.smooth_l1_loss])
def test_what_a_kernel_leaves_in_its_result_is_counted_once_in_a_real_step(criterion: Any) -> None:
    torch.manual_seed(0)
    model = Asks(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 256)))
    x, target = torch.randn(512, 16), torch.randn(512, 256)
    plan = recoup.plan(model, x, budget="100%", loss=lambda output, batch: criterion(output, target))
    evidence = recoup.verify(model, plan, x, loss=lambda output, batch: criterion(output, target), timed=False)
    assert plan.predicted.plain_peak_bytes == pytest.approx(evidence.baseline_peak_bytes, rel=0.01)


class OutOfPlace(torch.autograd.Function):
    """A user's own backward, which does what it says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.shape = x.shape
        return x[AT]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.new_zeros(ctx.shape).scatter_add(0, FEW, gradient)


def test_a_function_of_the_users_runs_as_written() -> None:
    trace = captured(Reads(OutOfPlace.apply), torch.randn(ROWS, WIDTH))
    names = [trace.signatures[op.signature].name for op in trace.ops]
    assert "aten.scatter_add.default" in names and "aten.scatter_add_.default" not in names
