"""`verify` as a lie detector: compares values, names the first module and op that differ, gives no false alarm."""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.capture.snapshot import Snapshot
from recoup.cost.model import FlopsCost
from recoup.evidence.gradients import StepResult, compare, not_finite, rounding_bound, rounding_noise, take_result
from recoup.evidence.noise import NOISE_FACTOR
from recoup.evidence.verify import verify_plan
from recoup.ir.decision import Decision, Recompute
from recoup.ir.plan import Plan
from recoup.runtime.apply import find_patches
from tests.evidence.ordinary import ORDINARY
from tests.thorough import cases

_WIDTH = 64


class Lying(nn.Module):
    """Its `act` adds a number that is larger each time it runs, at one place where no sampled byte is."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, _WIDTH)
        self.act = Act()
        self.down = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.act(self.up(x))))


_runs: queue.SimpleQueue[int] = queue.SimpleQueue()  # what nobody can put back


class Act(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _runs.put(1)
        where = torch.zeros_like(x)
        where[5, 17] = 1e-3 * _runs.qsize()
        return x.exp() + where


def _plan(model: nn.Module, batch: Any, *decisions: Decision) -> Plan:
    import dataclasses

    plan = recoup.plan(model, batch, budget="100%", cost=FlopsCost())
    return dataclasses.replace(plan, decisions=decisions)


def test_names_the_first_module_and_op_that_differ() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), Lying(), nn.Linear(_WIDTH, 1))
    batch = torch.randn(32, _WIDTH)
    evidence = verify_plan(model, _plan(model, batch, Recompute(path="1")), batch, timed=False)
    assert not evidence.replays_equal and not evidence.exact and not evidence.ok
    first = evidence.differences[0]
    assert first.startswith("region `1`: its second forward gave other values, first from")
    assert "`aten.tanh` in `1`" in first or "`aten.add` in `1.act`" in first
    assert "differs" in str(evidence) and "DIFFER" in str(evidence)


def test_fit_warns_of_what_is_not_exact() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Lying() for _ in range(5)), nn.Linear(_WIDTH, 1))
    batch = torch.randn(1024, _WIDTH)
    with pytest.warns(recoup.InexactWarning, match="keeps the plain step's results"):
        fitted = recoup.fit(model, batch, budget="75%", timed=False, actions=("recompute",))
    assert any(d.is_region for d in fitted.plan.decisions)
    assert str(fitted).rpartition("\n")[2].startswith("FAILED: region `")
    assert find_patches(model) == []  # what failed is not left behind
    with pytest.warns(recoup.InexactWarning, match="is in place all the same"):
        fitted = recoup.fit(model, batch, budget="75%", timed=False, actions=("recompute",), apply_failed=True)
    assert find_patches(model)
    fitted.applied.remove()


def _result(loss: float, *gradient: complex) -> StepResult:
    gradients: dict[str, torch.Tensor | None] = {"w": torch.tensor(gradient)}
    return StepResult(loss=torch.tensor(loss), gradients=gradients, buffers={}, attributes={}, random_state=_NO_RANDOM)


_NO_RANDOM = (torch.zeros(1), None, None, None)
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("bound", [0.0, 1e-6])
def test_what_is_no_number_on_one_side_only_is_a_difference(bound: float) -> None:
    for plain, planned in [((1, 1, 1), (1, 1, NAN)), ((1, 1, 1), (NAN, 1, 1)), ((1, 1, INF), (1, 1, 1))]:
        for one, other in ((plain, planned), (planned, plain)):
            found = compare(_result(*one), _result(*other), bound=bound)
            assert not found.holds and not found.is_exact and found.differences
            assert max(found.max_gradient_error, found.loss_error) > 0


@pytest.mark.parametrize("unit", [1, 1j])
def test_what_is_no_number_on_both_sides_is_none(unit: complex) -> None:
    plain = _result(NAN, NAN * unit, INF * unit, 1 * unit, 2 * unit)
    assert compare(plain, _result(NAN, NAN * unit, INF * unit, 1 * unit, 2 * unit)).is_exact
    near = _result(NAN, NAN * unit, INF * unit, 1 * unit, (2 + 4e-7) * unit)
    assert compare(plain, near, bound=1e-6).holds and not compare(plain, near).holds
    assert not compare(plain, _result(NAN, NAN * unit, INF * unit, 1 * unit, 2.1 * unit), bound=1e-6).holds


def test_equal_numbers_that_are_none_are_no_proof() -> None:
    assert not not_finite(_result(1, 1, 2))
    assert not_finite(_result(INF, 1, 2)).startswith("the loss holds NaNs or infinities")
    assert not_finite(_result(1, 1, NAN)).startswith("1 of 1 gradients (`w`) hold NaNs")
    model, batch = nn.Linear(_WIDTH, _WIDTH), torch.randn(32, _WIDTH)
    with torch.no_grad():
        model.weight[0, 0] = NAN
    evidence = verify_plan(model, _plan(model, batch), batch, timed=False)
    assert any(note.startswith("the loss holds NaNs or infinities without a plan too") for note in evidence.notes)


def test_state_in_attributes_is_no_difference_and_is_put_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(_WIDTH, _WIDTH)
            self.calls = 0
            self.seen: list[int] = []
            self.total = torch.zeros(_WIDTH)
            self.stream = torch.Generator().manual_seed(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen.append(self.calls)
            self.total += x.detach().mean(0)
            noise = torch.rand(x.shape, generator=self.stream)
            return torch.tanh(self.fc(x) * self.calls + self.total + noise)

    model = nn.Sequential(Counting(), Counting(), nn.Linear(_WIDTH, 1))
    stream = model[0].stream.get_state()
    batch = torch.randn(32, _WIDTH)
    decisions = [Recompute(path=p) for p in ("0", "1")]
    evidence = verify_plan(model, _plan(model, batch, *decisions), batch, timed=False)
    assert evidence.exact and evidence.num_regions_replayed == 2, evidence.differences
    assert evidence.num_replays_compared >= 4
    assert (model[0].calls, model[0].seen) == (0, [])
    assert torch.equal(model[0].total, torch.zeros(_WIDTH))
    assert torch.equal(model[0].stream.get_state(), stream)


class _Registers(nn.Module):
    """Layers that a first forward registers hooks on, as transformers does where outputs are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not layer._forward_hooks:
                layer.register_forward_hook(lambda module, args, output: self.seen.append(len(output)))
            x = x + layer(x)
        return x.square().mean()


def test_hooks_that_a_step_registers_are_no_difference() -> None:
    model = _Registers()
    found = recoup.fit(model, torch.randn(64, 16), budget="80%", timed=False)
    assert found.evidence.ok and found.evidence.buffers_equal and found.plan.decisions
    assert not model.seen and not any(layer._forward_hooks for layer in model.layers)  # as they were


def test_there_are_twenty_ordinary_models() -> None:
    assert len(ORDINARY) == 20


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(ORDINARY, list(ORDINARY)[::2]))
def test_no_false_alarm(name: str) -> None:
    torch.manual_seed(0)
    model, batch = ORDINARY[name]()
    loss = None if isinstance(batch, dict) else (lambda output, batch: output.float().square().mean())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        curve = recoup.frontier(model, batch, loss=loss, cost=FlopsCost(), num_points=2)
        plan = min(curve.points, key=lambda point: point.peak_bytes).plan
        assert plan.decisions
        recomputed = [d.path for d in plan.decisions if d.is_region]
        evidence = recoup.verify(model, plan, batch, loss=loss, timed=False)
    ours = [w for w in caught if "recoup" in str(w.filename) or "recoup" in str(w.message)]
    assert not ours, [str(w.message) for w in ours]
    assert evidence.exact, evidence.differences
    assert evidence.differences == ()
    assert not recomputed or evidence.num_replays_compared


def test_the_bound_of_tiles_is_at_least_what_plain_steps_differ_by() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    x = torch.randn(256, 64)

    def step(times: float) -> StepResult:
        model.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        (loss * times).backward()
        return take_result(model, loss, Snapshot(model), {})

    plain, scaled = step(1.0), step(NOISE_FACTOR)
    noise = rounding_noise(plain, scaled)
    assert 1e-8 < noise < 1e-5
    assert rounding_noise(plain, step(1.0)) == pytest.approx(1 - 1 / NOISE_FACTOR)  # gradients that are not scaled
    assert rounding_bound(plain, None, noise) == max(noise, 1e-6)
    assert rounding_bound(plain, torch.float32, 3e-6) == 3e-6
    assert rounding_bound(plain, torch.float32, 1.0) == pytest.approx(1e-5)
    assert rounding_bound(plain, torch.float32, 2.6e-5, is_random=False) == 2.6e-5
    assert rounding_bound(plain, torch.bfloat16, 0.0) == 4e-2  # what autocast computes in, and no gradient shows
    assert compare(plain, plain).error_bound == 0.0


@pytest.mark.parametrize("num_examples", [1, 3])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_running_statistics_that_kernels_update_are_no_difference(
    kind: Callable[..., nn.Module], num_examples: int
) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 8, 3), kind(8, affine=True, track_running_stats=True), nn.GELU())
    model, x = nn.Sequential(block, nn.Conv2d(8, 2, 3)), torch.randn(num_examples, 3, 32, 32)
    evidence = verify_plan(model, _plan(model, x, Recompute(path="0")), x, timed=False)
    assert evidence.exact, evidence.differences


def test_a_batch_that_the_plan_was_not_made_for_is_named() -> None:
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())))
    plan = recoup.plan(model, torch.randn(512, 64), budget="70%")
    evidence = recoup.verify(model, plan, torch.randn(1024, 64), timed=False)
    assert not evidence.within_budget and evidence.exact
    assert "made for a batch of 128.0 KiB, and this one has 256.0 KiB" in str(evidence)
    assert "saved tensors again" in str(evidence) and "regions" not in str(evidence)
    assert "made for" not in str(recoup.verify(model, plan, torch.randn(512, 64), timed=False))
