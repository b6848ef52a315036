"""Compiled steps within a budget: peaks, gradients, and what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.compiled.combine import Combination
from recoup.compiled.fitting import CompiledFitting, Measured
from recoup.compiled.recording import CompileOptions
from recoup.ir.compiled_plan import CompiledPlan
from tests.compiled.models import Blocks, Gated, Residual

AOT = {"backend": "aot_eager"}


def fitted(model: nn.Module, batch: Any, budget: str, **options: Any) -> Any:
    torch.manual_seed(1)
    return recoup.fit(model, batch, budget=budget, compiled={**AOT, **options}, timed=False)


@pytest.mark.parametrize(("kind", "options"), [(Residual, {}), (Blocks, {"modules": ["blocks.*"]})])
def test_a_model_that_is_fitted_and_let_go_is_gone(kind: type[nn.Module], options: dict[str, Any]) -> None:
    model, batch = kind(), torch.randn(256, 32)
    fitted(model, batch, "80%", **options).applied.remove()
    left = weakref.WeakSet(model.modules())
    del model
    gc.collect()
    assert not left  # though torch keeps backends for ever


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_peaks_are_within_budgets_and_as_predicted(dropout: float) -> None:
    torch.manual_seed(0)
    model, batch = Residual(dropout=dropout), torch.randn(512, 32)
    peaks = []
    for budget in ("75%", "50%"):
        found = fitted(model, batch, budget)
        evidence = found.evidence
        assert evidence.ok and evidence.gradients_equal and evidence.rng_equal
        assert evidence.peak_bytes <= evidence.budget_bytes
        assert abs(evidence.predicted_peak_bytes / evidence.peak_bytes - 1) < 0.03
        peaks.append(evidence.peak_bytes)
        assert CompiledPlan.from_json(found.plan.to_json()) == found.plan
        assert found.plan.graphs[0].choice.rerun
        assert model._compiled_call_impl is found.applied.calls[model]
        found.applied.remove()
    assert peaks[1] < peaks[0]
    assert model._compiled_call_impl is None


@pytest.mark.slow
def test_the_smallest_peak_is_reached_as_predicted() -> None:
    torch.manual_seed(0)
    found = fitted(Gated(), torch.randn(512, 32), "min")
    evidence = found.evidence
    assert evidence.ok and evidence.gradients_equal
    assert evidence.peak_bytes == evidence.predicted_peak_bytes == evidence.budget_bytes
    assert evidence.peak_bytes < 0.4 * evidence.baseline_peak_bytes
    order = found.plan.graphs[0].choice.order
    assert len(set(order)) < len(order)
    found.applied.remove()


@pytest.mark.slow
def test_training_goes_on_with_the_compiled_model() -> None:
    torch.manual_seed(0)
    model, batch = Residual(num_blocks=3, dropout=0.1), torch.randn(256, 32)
    twin = Residual(num_blocks=3, dropout=0.1)
    twin.load_state_dict(model.state_dict())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    fitted(model, batch, "60%")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    for trained in (model, twin):
        torch.manual_seed(2)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for _ in range(2):
            for part in batch.chunk(2):  # accumulated, of another size than planned
                trained(part).backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_a_graph_break_leaves_two_graphs_under_one_budget() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Residual(num_blocks=3), Residual(num_blocks=3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + self.first(x)
            torch._dynamo.graph_break()
            loss: torch.Tensor = self.second(y)
            return loss

    torch.manual_seed(0)
    found = fitted(Halves(), torch.randn(512, 32), "50%")
    assert found.evidence.ok and len(found.plan.graphs) == 2


@pytest.mark.slow
def test_too_small_a_budget_names_the_smallest_that_works() -> None:
    model, batch = Residual(num_blocks=3), torch.randn(128, 32)
    with pytest.raises(recoup.InfeasibleBudget, match="smallest reachable peak") as caught:
        fitted(model, batch, "10%")
    assert caught.value.minimum_bytes > caught.value.budget_bytes
    assert model._compiled_call_impl is None
    assert fitted(model, batch, caught.value.minimum_bytes).evidence.peak_bytes == caught.value.minimum_bytes


@pytest.mark.slow
def test_compile_without_a_batch() -> None:
    torch.manual_seed(0)
    model, batch = Residual(num_blocks=3), torch.randn(256, 32)
    model(batch).backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    handle = recoup.compile(model, budget="400KiB", compiled=AOT)
    model(batch).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True) if p.grad is not None)
    handle.remove()


def test_predictions_are_corrected_as_the_measured_steps_nearest_to_them() -> None:
    fitting = object.__new__(CompiledFitting)
    fitting.plain_peak_bytes = 110
    fitting.torch_choice = Combination(chosen=(), peak_bytes=100, seconds=0.0)
    fitting._found = [Combination(chosen=(), peak_bytes=peak, seconds=0.0) for peak in (100, 80, 60, 40)]
    fitting._planned = {}
    fitting._measured = {2: Measured(calls={}, peak_bytes=62, predicted_bytes=70)}
    assert [fitting._predicted(at) for at in range(4)] == [110, 86, 62, 42]


def test_a_choice_is_taken_once_no_faster_one_is_predicted_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = object.__new__(CompiledFitting)
    fitting.model = nn.Identity()
    fitting.plain_peak_bytes = 130  # all are predicted 30 too high, but for the plain one
    fitting.torch_choice = Combination(chosen=(), peak_bytes=100, seconds=0.0)
    peaks, compiled = (100, 80, 70, 60, 40), list[int]()
    fitting._found = [Combination(chosen=(), peak_bytes=p, seconds=100.0 - p) for p in peaks]
    fitting._planned, fitting._measured = {}, {}
    fitting.options = CompileOptions.of(AOT)

    def compile_choice(at: int, budget_bytes: int) -> Measured:
        compiled.append(at)
        return Measured(calls={}, peak_bytes=peaks[at], predicted_bytes=fitting._predicted(at))

    monkeypatch.setattr(fitting, "record", lambda: 130)
    monkeypatch.setattr(fitting, "_compiled", compile_choice)
    monkeypatch.setattr(fitting, "_prove", lambda made, calls, peak, *rest: peak)
    found = [fitting.fit(budget, free_bytes=None, timed=False) for budget in (95, 90, 85, 75, 65, 45)]
    assert found == [80, 80, 80, 70, 60, 40]
    assert compiled == [3, 1, 2, 4]  # for 60 it was 90 that was predicted; then 80 should be within 95, and is


def test_bad_input_is_refused_before_anything_is_compiled() -> None:
    model, batch = Residual(num_blocks=1), torch.randn(4, 32)
    for options, said in (
        ({"backend": "eager"}, "inductor or aot_eager"),
        ({"backends": "inductor"}, "no option of torch.compile"),
        ({"mode": "reduce-overhead"}, "CUDA graphs"),
        ({"backend": "aot_eager", "mode": "default"}, "inductor's"),
    ):
        with pytest.raises(recoup.UsageError, match=said):
            recoup.fit(model, batch, budget="50%", compiled=options)
    with pytest.raises(recoup.UsageError, match="has no meaning"):
        recoup.fit(model, batch, budget="50%", compiled=True, keep=["norms"])
