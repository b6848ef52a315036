"""Mixed precision under a plan: autocast, its weight-cast cache, GradScaler; bits and bytes as without a plan."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import recoup
from recoup.integrations.precision import autocast_forward
from recoup.ir.decision import Recompute, Rederive
from recoup.runtime.apply import apply_decisions
from tests.models import Stack, make, same
from tests.thorough import cases

LOW = [torch.bfloat16, torch.float16]
PLANS = {
    "regions": [Recompute(path=f"layers.{i}") for i in range(4)],
    "rederive": [Rederive(path="")],
    "span": [Recompute(path="layers.0", span=("layers.1", "layers.2"), inside="rederive")],
    "nested": [
        Recompute(path="layers.0", span=("layers.1",)),
        Recompute(path="layers.1", inside="rederive"),
    ],
}


class Mixed(nn.Module):
    """Layers that change autocast for a part of their forward, as attention and losses do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Changes(how) for _ in range(4))
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class Changes(nn.Module):
    """A block whose middle runs in another precision than its ends."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm, self.up, self.act, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        if self.how == "disabled":
            with torch.autocast("cpu", enabled=False):
                h = nn.functional.linear(self.act(h.float()), self.down.weight, self.down.bias)
            return x + self.down(nn.functional.silu(self.up(h)))
        if self.how == "disabled twice":
            with torch.autocast("cpu", enabled=False), torch.autocast("cpu", torch.bfloat16):
                h = self.act(h)
                with torch.autocast("cpu", enabled=False):
                    h = h.float().exp().clamp(max=2.0)
            return x + self.down(h)
        with torch.autocast("cpu", torch.float16 if torch.get_autocast_dtype("cpu") == LOW[0] else LOW[0]):
            return x + self.down(self.act(h))


def _step(model: nn.Module, batch: Any, context: Any, *, inside: bool = False) -> list[torch.Tensor]:
    """Forward in `context`, backward outside of it, or inside."""
    torch.manual_seed(1)
    model.zero_grad()
    with context:
        output = model(**batch) if isinstance(batch, dict) else model(batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None), torch.rand(2)]


def _autocast(dtype: torch.dtype, **options: Any) -> Any:
    return torch.autocast("cpu", dtype, **options)


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_forward_in_autocast(plan: str, dtype: torch.dtype, inside: bool) -> None:
    model, batch, _ = make("stack")
    for options in ({}, {"cache_enabled": False}):
        expected = _step(model, batch, _autocast(dtype, **options), inside=inside)
        with apply_decisions(model, PLANS[plan]):
            assert same(_step(model, batch, _autocast(dtype, **options), inside=inside), expected)


@pytest.mark.parametrize("outer", [None, *LOW], ids=str)
@pytest.mark.parametrize("how", ["disabled", "disabled twice", "other dtype"])
@pytest.mark.parametrize("plan", PLANS)
def test_autocast_changes_inside_a_region(plan: str, how: str, outer: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, batch = Mixed(how), torch.randn(64, 32)

    def context() -> Any:
        return contextlib.nullcontext() if outer is None else _autocast(outer)

    for inside in (False, True):
        expected = _step(model, batch, context(), inside=inside)
        with apply_decisions(model, PLANS[plan]):
            assert same(_step(model, batch, context(), inside=inside), expected)
    assert not torch.is_autocast_enabled("cpu")


def test_each_part_of_a_span_keeps_its_own_autocast() -> None:
    model, batch, _ = make("stack")

    def run() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        x = batch
        for i, layer in enumerate(model.layers):  # type: ignore[union-attr, arg-type]
            with _autocast(LOW[i % 2], enabled=i != 2):
                x = layer(x)
        x.float().square().mean().backward()
        return [x.detach(), *(p.grad.clone() for p in model.layers.parameters())]  # type: ignore[union-attr]

    expected = run()
    for name in PLANS:
        with apply_decisions(model, PLANS[name]):
            assert same(run(), expected)


class Tied(nn.Module):
    """One weight in every layer: cast once in a forward under autocast, by whichever layer comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(4))
        for layer in self.layers:
            layer[1].weight = self.layers[0][1].weight  # type: ignore[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class _Casts(TorchDispatchMode):
    """Counts casts of parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = {p.data_ptr(): n for n, p in model.named_parameters()}
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.parameters:
            self.counts[self.parameters[args[0].data_ptr()]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("plan", ["regions", "rederive", "span"])
def test_the_weight_cast_cache(plan: str) -> None:
    torch.manual_seed(0)
    model, batch = Tied(), torch.randn(64, 32)
    forward, expected = Counter[str](), _step(model, batch, _autocast(LOW[0]))
    for decisions in ([], PLANS[plan]):
        with apply_decisions(model, decisions), _Casts(model) as casts, _autocast(LOW[0]):
            loss = model(batch)
        forward = forward or casts.counts
        assert casts.counts == forward  # once each in forward, planned or not
        assert set(casts.counts.values()) == {1}
        loss.backward()
    with apply_decisions(model, PLANS[plan]):
        found = _step(model, batch, _autocast(LOW[0]))
        assert same(found, expected)
        # A weight that changed between steps is cast anew: nothing of the cache outlives a forward.
        with torch.no_grad():
            model.layers[0][1].weight.mul_(2.0)  # type: ignore[index]
        assert not same(_step(model, batch, _autocast(LOW[0])), expected)


@pytest.mark.parametrize("kind", ["stack", "gpt2", "conv"])
def test_a_scaler_sees_the_same_gradients(kind: str) -> None:
    model, batch, loss_of = make(kind)
    twin = copy.deepcopy(model)
    plan = [Rederive(path="")]
    plan += [Recompute(path=n) for n, m in model.named_modules() if n.endswith((".1", "body"))]
    results = []
    for net, decisions in ((twin, []), (model, plan)):
        torch.manual_seed(2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2)  # overflows at first
        scales = []
        with apply_decisions(net, decisions):
            for _ in range(16):
                optimizer.zero_grad()
                with _autocast(torch.float16):
                    output = net(**batch) if isinstance(batch, dict) else net(*batch) if loss_of else net(batch)
                    loss = loss_of(output, batch) if loss_of else getattr(output, "loss", output)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
        results.append([torch.tensor(scales), *(p.detach() for p in net.parameters())])
    assert same(*results)
    assert results[0][0].min() < 2.0**30  # some steps were skipped
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), make(kind)[0].parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("kind", cases(["gpt2", "llama", "stack"], ["gpt2"]))
def test_predicted_peak_counts_cast_copies(kind: str, dtype: torch.dtype) -> None:
    if kind == "stack":
        model, batch = Stack(width=128), torch.randn(512, 128)
    else:
        model, batch, _ = make(kind)
        batch = {name: ids.repeat(4, 1) for name, ids in batch.items()}
    with autocast_forward(model, dtype):
        fit = recoup.fit(
            model, batch, budget="80%", optimizer=torch.optim.AdamW, timed=False, actions=("rederive", "recompute")
        )
    assert fit.plan.decisions
    assert fit.evidence.exact
    assert fit.evidence.baseline_peak_bytes is not None
    plain_error = fit.plan.predicted.plain_peak_bytes / fit.evidence.baseline_peak_bytes - 1
    error = fit.plan.predicted.peak_bytes / fit.evidence.peak_bytes - 1
    assert abs(plain_error) < 0.001
    assert -0.001 < error < 0.1  # a step that follows a program lets go of casts that the record of it holds


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_planning_inside_autocast(dtype: torch.dtype) -> None:
    model, batch = Stack(width=128), torch.randn(512, 128)
    twin = copy.deepcopy(model)
    with _autocast(dtype):
        fit = recoup.fit(model, batch, budget="80%", timed=False)
    assert fit.plan.decisions
    assert fit.evidence.exact
    assert same(_step(model, batch, _autocast(dtype)), _step(twin, batch, _autocast(dtype)))
