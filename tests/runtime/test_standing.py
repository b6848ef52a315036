"""What a region noted in an earlier step is taken again only while nothing that it rests on has changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.ir.decision import Decision, Recompute
from recoup.runtime.apply import apply_decisions
from recoup.runtime.recompute.module_state import AttributeState, walk
from recoup.runtime.recompute.tables import Tables


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(2)))


GAIN = 1.0


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * GAIN


PLAN: list[Decision] = [Recompute(path="0"), Recompute(path="1")]


def _rename(module: Any) -> None:
    module._parameters["weight"], module._parameters["bias"] = module._parameters["bias"], module._parameters["weight"]


# What may happen to a module, and whether its tables show it.
CHANGES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda m: setattr(m.up, "note", 1),
    "attribute past __setattr__": lambda m: object.__setattr__(m.up, "note", 1),
    "attribute in __dict__": lambda m: m.up.__dict__.update(note=1),
    "attribute deleted": lambda m: delattr(m, "scale"),
    "number for an equal one": lambda m: setattr(m, "scale", True),
    "mode": lambda m: m.norm.eval(),
    "parameter": lambda m: setattr(m.up, "bias", nn.Parameter(torch.zeros(16))),
    "parameter in the table": lambda m: m.up._parameters.update(bias=m.norm.bias),
    "parameter taken away": lambda m: m.up.register_parameter("bias", None),
    "parameters swapped": lambda m: _rename(m.norm),
    "child": lambda m: setattr(m, "up", nn.Linear(8, 16)),
    "child of a leaf": lambda m: m.norm.add_module("inner", nn.Tanh()),
    "hook": lambda m: m.up.register_forward_hook(lambda *_: None),
    "hook of backward": lambda m: m.register_full_backward_hook(lambda *_: None),
    "table": lambda m: setattr(m.up, "_forward_hooks", {}),
}


def _tables_of(module: nn.Module) -> Tables:
    modules = walk(module)
    tables = AttributeState(modules).tables(modules)
    assert tables is not None
    return tables


@pytest.mark.parametrize("change", CHANGES)
def test_tables_show_a_change(change: str) -> None:
    block = Block()
    tables = _tables_of(block)
    before = tables.versions()
    assert before is not None and tables.versions() == before
    block(torch.randn(2, 8)).sum().backward()
    block.zero_grad()
    block.train()
    assert tables.versions() == before  # none of this changes a table
    CHANGES[change](block)
    assert tables.versions() != before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_tables_cannot_tell_is_looked_at_in_each_step() -> None:
    for module in (nn.BatchNorm1d(4), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))):
        modules = walk(module)
        assert AttributeState(modules).tables(modules) is None  # buffers change in place
    block = Block()
    block.seen = [1]
    modules = walk(block)
    assert AttributeState(modules).tables(modules) is None  # so do lists
    traced: Any = torch.jit.trace(nn.Linear(2, 2), torch.randn(1, 2))  # its tables are windows on TorchScript's
    modules = walk(traced)
    tables = AttributeState(modules).tables(modules)
    assert tables is None or tables.versions() is None


@pytest.mark.parametrize("when", ["before forward", "before backward"])
def test_a_global_that_a_forward_reads(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    found = []
    for plan in ([], [Recompute(path="0")]):
        torch.manual_seed(0)
        net = nn.Sequential(Reads(), nn.Linear(8, 1))
        with apply_decisions(net, plan):
            for step in range(4):
                if when == "before forward":
                    monkeypatch.setitem(globals(), "GAIN", 2.0 + step)
                loss = net(x).square().sum()
                if when == "before backward":
                    monkeypatch.setitem(globals(), "GAIN", 2.0 + step)
                loss.backward()
                assert 2.0 + step == GAIN
                found.append(_gradients(net))
        monkeypatch.setitem(globals(), "GAIN", 1.0)
    for plain, planned in zip(found[:4], found[4:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))


def _gradients(net: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    return found


FORWARD_CHANGES: dict[str, Callable[[Any], object]] = {
    name: CHANGES[name] for name in ("number for an equal one", "mode", "parameter", "child", "table")
}
FORWARD_CHANGES["scale"] = lambda m: setattr(m, "scale", 0.5)


@pytest.mark.parametrize("when", ["before forward", "before backward"])
@pytest.mark.parametrize("change", FORWARD_CHANGES)
def test_a_change_between_steps_or_within_one(change: str, when: str) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    found = []
    for plan in ([], PLAN):
        net = _net()
        with apply_decisions(net, plan):
            for _ in range(3):
                net(x).square().sum().backward()
                net.zero_grad()
            torch.manual_seed(7)
            if when == "before forward":
                FORWARD_CHANGES[change](net[0])
            loss = net(x).square().sum()
            if when == "before backward":
                FORWARD_CHANGES[change](net[0])
            before = {name: dict(vars(m)) for name, m in net.named_modules()}
            loss.backward()
            after = {name: dict(vars(m)) for name, m in net.named_modules()}
            assert all(after[n].keys() == b.keys() for n, b in before.items())
            assert all(after[n][k] is v for n, b in before.items() for k, v in b.items())
            found.append(_gradients(net))
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_replaced_block_is_let_go() -> None:
    net = _net()
    with apply_decisions(net, PLAN):
        for _ in range(3):
            net(torch.randn(4, 8)).sum().backward()
        block, weight = weakref.ref(net[1].up), weakref.ref(net[1].up.weight)
        gc.collect()
        gc.disable()
        try:
            net[1].up = nn.Linear(8, 16)
            assert block() is None and weight() is None
        finally:
            gc.enable()
        net(torch.randn(4, 8)).sum().backward()
        assert net[1].up.weight.grad is not None


def test_a_planned_model_is_let_go_without_a_collection() -> None:
    net = _net()
    apply_decisions(net, PLAN)
    for _ in range(3):
        net(torch.randn(4, 8)).sum().backward()
    found = weakref.ref(net[0])
    gc.collect()
    gc.disable()
    try:
        del net
        assert found() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("hooks", [None, lambda: torch.autograd.graph.save_on_cpu()])
def test_inputs_are_kept_as_autograd_would(hooks: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 1))
    x = torch.randn(4, 8)
    packed: list[Tensor] = []
    with apply_decisions(net, [Recompute(path="1")]):
        for _ in range(2):
            given = net[0](x)
            if hooks is None:
                out = net[1](given)
            else:
                with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
                    out = net[1](given)
                assert any(t is given for t in packed)  # the user's hooks see what a region keeps
            out.sum().backward()
        given = net[0](x)
        out = net[1](given)
        with torch.no_grad():
            given.mul_(2.0)
        with pytest.raises(recoup.ReplayError, match="changed in place"):
            out.sum().backward()


class Differentiates(nn.Module):
    """Its forward asks for the gradient of what it has computed so far."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope


def test_a_gradient_inside_a_forward_is_refused_by_name() -> None:
    net = nn.Sequential(nn.Linear(8, 8), Differentiates())
    with apply_decisions(net, [Recompute(path="1")]), pytest.raises(recoup.ReplayError, match="Region `1`"):
        net(torch.randn(2, 8))
