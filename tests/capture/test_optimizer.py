"""Optimizers are rebuilt from class, groups and state: nothing of the user's runs, and their bytes are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import recoup
from recoup import _torch
from recoup.capture.capture import capture
from recoup.capture.optimizer import prepare_optimizer, unwrapped
from recoup.capture.spec import StepSpec


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as it is commonly published: made of another optimizer, asks for a closure."""

    def __init__(self, params: Any, base_optimizer: type[torch.optim.Optimizer], rho: float = 0.05, **kwargs: Any):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM asks for a closure"
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.clone()
                p.add_(p.grad, alpha=group["rho"])
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["before"])
        self.base_optimizer.step()


class Stubborn(torch.optim.SGD):
    """Cannot be made from its settings, and its step wants what only its maker has."""

    def __init__(self, model: nn.Module, secret: Callable[[], None]) -> None:
        super().__init__(model.parameters(), lr=0.1, momentum=0.9)
        self.secret = secret

    def step(self, closure: Any = None) -> Any:
        self.secret()
        return super().step(closure)


class Averaged(torch.optim.Adam):
    """Keeps an attribute that its constructor is not told of."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.slow = {p: p.detach().clone() for p in self.param_groups[0]["params"]}

    def step(self, closure: Any = None) -> Any:
        for p, slow in self.slow.items():
            slow.lerp_(p.detach(), 0.5)
        return super().step(closure)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def _parameter_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


MAKERS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], float]] = {
    "Adam": (lambda m: torch.optim.Adam(m.parameters()), 2),
    "SGD": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), 1),
    "ASGD": (lambda m: torch.optim.ASGD(m.parameters()), 1),
    "LBFGS": (lambda m: torch.optim.LBFGS(m.parameters()), 2),
    "SAM": (lambda m: Sam(m.parameters(), torch.optim.AdamW, lr=1e-3), 3),
}


@pytest.mark.parametrize("name", MAKERS)
def test_state_is_counted(name: str) -> None:
    make, times = MAKERS[name]
    model = _model()
    trace = capture(StepSpec(model=model, batch=torch.randn(4, 8), optimizer=make(model)))
    state = sum(s.nbytes for s in trace.storages if s.label == "optimizer state")
    assert times * _parameter_bytes(model) <= state <= times * _parameter_bytes(model) + 512
    assert trace.notes == ()


@pytest.mark.parametrize("name", ["Adam", "NAdam", "Adamax"])
def test_one_that_has_stepped_is_stepped_like_a_fresh_one(name: str) -> None:
    """Its state has single values that are no fake tensors."""
    peaks = []
    for num_steps in (0, 2):
        model, x = _model(), torch.randn(4, 8)
        optimizer = getattr(torch.optim, name)(model.parameters())
        for _ in range(num_steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trace = capture(StepSpec(model=model, batch=x, optimizer=optimizer))
        assert trace.notes == ()
        peaks.append((len([op for op in trace.ops if op.phase == "optimizer"]), sum(s.nbytes for s in trace.storages)))
    assert peaks[0] == peaks[1]


def test_a_step_that_fails_leaves_no_mode() -> None:
    class Leaves(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if closure is None:
                FlopCounterMode(display=False).__enter__()
                raise RuntimeError("a closure is needed")
            return super().step(closure)

    model, before = _model(), _torch.thread_settings()
    capture(StepSpec(model=model, batch=torch.randn(4, 8), optimizer=Leaves(model.parameters(), lr=0.1)))
    assert _torch.thread_settings() == before


@pytest.mark.parametrize("name", ["Adafactor", "ASGD", "LBFGS"])
def test_a_class_that_reads_values_or_wants_a_closure(name: str) -> None:
    model = _model()
    assert recoup.plan(model, torch.randn(64, 8), budget="100%", optimizer=getattr(torch.optim, name))


def test_state_that_is_there_is_taken_over() -> None:
    """LBFGS grows a history: what it holds now counts."""
    model, x = _model(), torch.randn(16, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    held = next(iter(optimizer.state.values()))
    num_pairs = len(held["old_dirs"])
    assert num_pairs > 2
    before = [t.clone() for t in held["old_dirs"]]
    trace = capture(StepSpec(model=model, batch=x, optimizer=optimizer))
    state = sum(s.nbytes for s in trace.storages if s.label == "optimizer state")
    assert state >= 2 * num_pairs * _parameter_bytes(model)
    assert all(map(torch.equal, before, held["old_dirs"]))
    assert len(held["old_dirs"]) == num_pairs


def test_a_scheduler_that_was_made_before_is_not_run() -> None:
    model, x = _model(), torch.randn(16, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    stepped = []
    optimizer.register_step_post_hook(lambda *a: stepped.append(1))
    weights = [p.detach().clone() for p in model.parameters()]
    recoup.fit(model, x, budget="100%", optimizer=optimizer, timed=False)
    assert not optimizer.state
    assert not stepped
    assert not hasattr(optimizer, "_opt_called") or not optimizer._opt_called
    assert all(map(torch.equal, weights, model.parameters()))
    assert scheduler.last_epoch == 0


def test_hooks_for_all_optimizers_are_not_run() -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    model, called = _model(), []
    handle = register_optimizer_step_pre_hook(lambda *a: called.append(1))
    try:
        recoup.fit(model, torch.randn(16, 8), budget="100%", optimizer=torch.optim.SGD, timed=False)
        assert not called
        torch.optim.SGD(model.parameters()).step()
        assert called
    finally:
        handle.remove()


def test_what_cannot_be_stepped_is_estimated_and_said() -> None:
    model, calls = _model(), []
    optimizer = Stubborn(model, lambda: calls.append(1))
    made = recoup.plan(model, torch.randn(16, 8), budget="100%", optimizer=optimizer)
    assert not calls
    assert any("Stubborn" in note and "estimated" in note for note in made.notes)
    model(torch.randn(16, 8)).sum().backward()
    optimizer.step()
    assert len(calls) == 1
    trace = capture(StepSpec(model=model, batch=torch.randn(16, 8), optimizer=optimizer))
    assert len(calls) == 1
    estimated = sum(s.nbytes for s in trace.storages if s.label == "optimizer state (estimated)")
    assert estimated == _parameter_bytes(model)


def test_tensors_among_attributes_are_not_the_users() -> None:
    model = _model()
    optimizer = Averaged(model)
    slow = [t.clone() for t in optimizer.slow.values()]
    recoup.plan(model, torch.randn(16, 8), budget="100%", optimizer=optimizer)
    assert all(map(torch.equal, slow, optimizer.slow.values()))


def test_sparse_gradients_are_tried() -> None:
    embedding = nn.Embedding(16, 4, sparse=True)
    parameters = list(embedding.parameters())
    made = prepare_optimizer(
        torch.optim.SparseAdam(parameters), {id(p): p for p in parameters}, parameters, foreach=False
    )
    assert made.note == ""
    assert sum(t.nbytes for t in made.state_tensors()) == 2 * embedding.weight.nbytes


def test_wrapped_optimizers_are_unwrapped() -> None:
    accelerate = pytest.importorskip("accelerate")
    lightning = pytest.importorskip("lightning")
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    assert unwrapped(accelerate.Accelerator(cpu=True).prepare(optimizer)) is optimizer
    assert unwrapped(lightning.pytorch.core.optimizer.LightningOptimizer(optimizer)) is optimizer
    assert unwrapped(Sam(model.parameters(), torch.optim.SGD, lr=0.1)) is not None
