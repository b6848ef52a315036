"""Clean exits: a step that ends in an exception, anywhere, leaves a model whose next step is the plain one's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import recoup
from recoup.ir.decision import Recompute, Rederive
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild.lineage import current_recorder
from recoup.runtime.recompute.scope import inside_region


class Fault(Exception):
    """Injected."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.up = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(16, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.down(self.drop(torch.nn.functional.gelu(self.up(self.norm(x))))) * (1 + random.random())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            for layer in self.layers:
                x = layer(x)
        return x


class _FaultAt(TorchDispatchMode):
    """Raises at the i-th op in a phase of the step."""

    def __init__(self, phase: str, at: int, error: BaseException) -> None:
        super().__init__()
        self.phase, self.at, self.error = phase, at, error
        self.now, self.seen, self.raised = "", 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        where = "replay" if execution_context.is_recomputing() else self.now
        if where == self.phase and not self.raised:
            self.seen += 1
            if self.seen > self.at:
                self.raised = True
                raise self.error
        return func(*args, **(kwargs or {}))


PLANS = {
    "regions": [Recompute(path=f"layers.{i}") for i in range(3)],
    "span, rederived": [
        Rederive(path=""),
        Recompute(path="layers.0", span=("layers.1",), inside="rederive"),
        Recompute(path="layers.2.up"),
    ],
}
FAULTS = [
    *(("forward", i) for i in (0, 1, 3, 6, 9, 13)),
    *(("loss", i) for i in (0, 1)),
    *(("replay", i) for i in (0, 1, 2, 4, 7)),
    *(("backward", i) for i in (0, 1, 5, 9)),
    *(("optimizer", i) for i in (0, 2, 5)),
]


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, enter: Callable[[str], None] = lambda phase: None) -> None:
    optimizer.zero_grad()
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
    enter("forward")
    out = net(x)
    enter("loss")
    loss = (out.square() + out.abs()).mean()
    enter("backward")
    loss.backward()
    enter("optimizer")
    optimizer.step()


def _left(net: nn.Module) -> list[Any]:
    tensors = [t for p in net.parameters() for t in (p.detach(), p.grad)]
    return [*tensors, *net.buffers(), torch.rand(2), random.random(), float(np.random.rand())]


def _equal(a: list[Any], b: list[Any]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def _ambient() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        inside_region(),
        execution_context.is_recomputing(),
        current_recorder(),
        torch._C._len_torch_dispatch_stack(),
    )


def test_there_are_forty_faults() -> None:
    assert len(FAULTS) * len(PLANS) == 40


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("phase", "at"), FAULTS, ids=lambda value: str(value))
def test_the_step_after_a_fault_is_the_plain_one(plan: str, phase: str, at: int) -> None:
    """Weights, statistics and counters are set back as a user who retries would; all else must be as it was."""
    _seed(0)
    net = Net()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    _seed(1)
    _step(net, torch.optim.Adam(net.parameters(), lr=0.1))
    expected = _left(net)

    net.load_state_dict(state)
    forwards = {path: m.__dict__.get("forward") for path, m in net.named_modules()}
    hooks = {path: [dict(v) for k, v in m.__dict__.items() if "hook" in k and v] for path, m in net.named_modules()}
    with apply_decisions(net, PLANS[plan]):
        before = _ambient()
        mode = _FaultAt(phase, at, Fault("injected"))
        _seed(2)
        with pytest.raises(Exception) as caught, mode:
            _step(net, torch.optim.Adam(net.parameters(), lr=0.1), lambda phase: setattr(mode, "now", phase))
        assert mode.raised
        if phase != "replay":
            assert isinstance(caught.value, Fault), caught.value
        else:
            assert isinstance(caught.value, (Fault, recoup.ReplayError))
        assert _ambient() == before
        net.load_state_dict(state)
        _seed(1)
        _step(net, torch.optim.Adam(net.parameters(), lr=0.1))
        assert _equal(expected, _left(net))
    assert forwards == {path: m.__dict__.get("forward") for path, m in net.named_modules()}
    assert hooks == {
        path: [dict(v) for k, v in m.__dict__.items() if "hook" in k and v] for path, m in net.named_modules()
    }


@pytest.mark.parametrize("phase", ["forward", "replay", "backward"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("simulated")])
def test_interrupts_and_out_of_memory_come_through_as_they_are(phase: str, error: BaseException) -> None:
    """They leave the streams where the first forward left them: a replay's own position is never left behind."""
    _seed(0)
    net = Net()
    with apply_decisions(net, PLANS["regions"]):
        mode = _FaultAt(phase, 2, error)
        before = _ambient()
        with pytest.raises(type(error)), mode:
            _step(net, torch.optim.SGD(net.parameters(), lr=0.1), lambda phase: setattr(mode, "now", phase))
        assert _ambient() == before
        assert net.layers[2].calls == (0 if phase == "forward" else 1)


@pytest.mark.parametrize("error", [Fault("in capture"), KeyboardInterrupt()])
@pytest.mark.slow
def test_a_model_whose_capture_fails_is_as_before(error: BaseException) -> None:
    _seed(0)
    net = Net()
    net.layers[1].register_forward_hook(lambda *args: (_ for _ in ()).throw(error))
    before = {k: v.clone() for k, v in net.state_dict().items()}
    streams = random.getstate()
    with pytest.raises((recoup.StepError, KeyboardInterrupt)):
        recoup.plan(net, torch.randn(16, 8), budget="80%")
    assert random.getstate() == streams
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert [layer.calls for layer in net.layers] == [0, 0, 0]
    assert not any("forward" in m.__dict__ for m in net.modules())
    assert all(p.grad is None for p in net.parameters())


def test_a_model_whose_verification_fails_is_as_before() -> None:
    _seed(0)
    net = Net()
    calls = []

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 60 or not isinstance(output, torch.Tensor):
            raise Fault("late")
        return output.square().mean()

    fitted = recoup.plan(net, torch.randn(64, 8), budget="95%", loss=loss)
    calls.extend([1] * 60)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(Exception, match="late"):
        recoup.verify(net, fitted, torch.randn(64, 8), loss=loss)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert [layer.calls for layer in net.layers] == [0, 0, 0]
    assert not any("forward" in m.__dict__ for m in net.modules())


class _Checkpointed(nn.Module):
    """Has torch's own checkpoint inside."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.inner, torch.tanh(x), use_reentrant=False) * 2

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.fc(x))


def test_the_users_own_checkpoint_inside_a_region_is_exact() -> None:
    def run(regions: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), _Checkpointed(), nn.Linear(8, 8))
        with apply_decisions(net, [Recompute(path="1")] if regions else []):
            net(torch.ones(4, 8)).square().sum().backward()
        return [p.grad for p in net.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_an_error_in_a_second_forward_says_where_and_keeps_its_cause() -> None:
    class Breaking(_Checkpointed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if recoup.is_recomputing():
                raise Fault("the file is closed")
            return super().forward(x)

    net = nn.Sequential(nn.Linear(8, 8), Breaking(), nn.Linear(8, 8))
    with (
        apply_decisions(net, [Recompute(path="1")]),
        pytest.raises(recoup.ReplayError, match=r"Region `1`: its second forward failed: Fault") as caught,
    ):
        net(torch.ones(4, 8)).square().sum().backward()
    assert caught.value.code == "E207"
    assert isinstance(caught.value.__cause__, Fault)
