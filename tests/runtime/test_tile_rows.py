"""Modules over tiles: values and gradients beside the plain call, memory, hooks, autocast, errors, undoing."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import gc
import pickle
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import ReplayError, UsageError
from recoup.ir.decision import Decision, Recompute, Rederive, TileModule
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions

H = 24
BOUND = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}


class Gated(nn.Module):
    """A SwiGLU MLP, with a scale that may be given."""

    def __init__(self, width: int = H) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor, *, scale: Any = 1.0) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) * scale


class Layer(nn.Module):
    """A mixer of positions and a gated MLP, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.mlp = Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + x.cumsum(1).tanh()
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def step(run: Callable[..., torch.Tensor], x: torch.Tensor, module: nn.Module) -> list[torch.Tensor]:
    """Returns the result, the input's gradient and those of the parameters."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def assert_near(found: list[torch.Tensor], wanted: list[torch.Tensor], bound: float) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (a.double() - b.double()).norm() <= bound * b.double().norm()


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", [(2, 33, H), (70, H), (1, 130, H)])
def test_values_and_gradients(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, x = Gated().to(dtype), torch.randn(shape, dtype=dtype)
    wanted = step(module, x, module)
    found = step(lambda x: recoup.tiled(module, x, num_tiles=4), x, module)
    assert_near(found, wanted, BOUND[dtype])
    assert_near(found[:2], wanted[:2], 1e-7 if dtype == torch.float32 else BOUND[dtype])


def test_sums_of_bf16_are_nearer_than_without_tiles() -> None:
    """Each tile's share is added in float32: many tiles do not lose what few do not."""
    torch.manual_seed(0)
    exact, x = Gated().double(), torch.randn(1, 512, H, dtype=torch.float64)
    wanted = step(exact, x, exact)
    module = copy.deepcopy(exact).bfloat16()
    few, many = (
        step(lambda x, n=n: recoup.tiled(module, x, num_tiles=n), x.bfloat16(), module)  # type: ignore[misc]
        for n in (1, 64)
    )
    for a, b, w in zip(few[2:], many[2:], wanted[2:], strict=True):
        assert (b.double() - w).norm() <= 1.3 * (a.double() - w).norm()


def test_arguments_that_are_cut_given_whole_and_plain() -> None:
    torch.manual_seed(0)
    module, x = Gated(), torch.randn(2, 20, H)
    scales = [torch.randn(2, 20, 1), torch.randn(H), torch.tensor(0.5), 2.0]
    for scale in scales:
        gradients = []
        for run in (module, lambda x, **k: recoup.tiled(module, x, num_tiles=3, **k)):
            held = scale.clone().requires_grad_() if isinstance(scale, torch.Tensor) else scale
            found = step(lambda x, run=run, held=held: run(x, scale=held), x, module)  # type: ignore[misc]
            gradients.append([*found, held.grad] if isinstance(held, torch.Tensor) else found)
        assert_near(gradients[1], gradients[0], 1e-6)


def test_frozen_shared_and_unused_parameters() -> None:
    torch.manual_seed(0)
    module, x = Gated(), torch.randn(2, 20, H)
    module.up.weight.requires_grad_(False)
    module.gate.weight = module.up.weight  # frozen and shared
    module.unused = nn.Linear(2, 2)
    wanted = step(module, x, module)
    found = step(lambda x: recoup.tiled(module, x, tile_tokens=7), x, module)
    assert_near(found, wanted, 1e-6)
    assert module.unused.weight.grad is None and module.up.weight.grad is None
    module.requires_grad_(False)
    assert_near(
        step(lambda x: recoup.tiled(module, x, tile_tokens=7), x, module)[:2], step(module, x, module)[:2], 1e-6
    )


def test_gradients_add_up_and_hooks_run_once() -> None:
    torch.manual_seed(0)
    module, x = Gated(), torch.randn(2, 20, H)
    seen: list[str] = []
    module.up.weight.register_hook(lambda g: seen.append("gradient") or 2 * g)
    module.up.bias.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    results = []
    for run in (module, lambda x: recoup.tiled(module, x, num_tiles=5)):
        module.zero_grad()
        for _ in range(2):
            run(x).sum().backward()
        results.append([p.grad.clone() for p in module.parameters()])
    assert_near(results[1], results[0], 1e-6)
    assert sorted(seen) == ["accumulated"] * 4 + ["gradient"] * 4


def test_a_function_with_parameters_around_it() -> None:
    torch.manual_seed(0)
    module, x = Gated(), torch.randn(2, 20, H)

    def branch(x: torch.Tensor) -> torch.Tensor:
        return x + module(x).tanh()

    assert_near(step(lambda x: recoup.tiled(branch, x, num_tiles=3), x, module), step(branch, x, module), 1e-6)


def test_autocast() -> None:
    torch.manual_seed(0)
    module, x = Gated(), torch.randn(2, 40, H)

    def under(run: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def inside(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return run(x) + module(x)  # the same weights, whose casts are cached

        return inside

    wanted = step(under(module), x, module)
    found = step(under(lambda x: recoup.tiled(module, x, num_tiles=4)), x, module)
    assert wanted[0].dtype == torch.bfloat16
    assert_near(found, wanted, 2e-2)


def test_second_backward_and_second_derivative() -> None:
    torch.manual_seed(0)
    module, x = Gated(), torch.randn(1, 20, H, requires_grad=True)
    y = recoup.tiled(module, x, num_tiles=2).sum()
    y.backward(retain_graph=True)
    first = module.up.weight.grad.clone()
    y.backward()
    assert torch.equal(module.up.weight.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    y = recoup.tiled(module, x, num_tiles=2).sum()
    with pytest.raises(UsageError, match="second derivative"):
        torch.autograd.grad(y, x, create_graph=True)


def test_what_it_keeps_is_its_input() -> None:
    module, x = Gated(), torch.randn(1, 64, H, requires_grad=True)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        recoup.tiled(module, x, num_tiles=4)
    assert kept == [x.shape]


def test_changed_between_forward_and_backward() -> None:
    module, x = Gated(), torch.randn(1, 20, H)
    y = recoup.tiled(module, x, num_tiles=2).sum()
    with torch.no_grad():
        module.up.weight.mul_(2)
    with pytest.raises(ReplayError, match="was changed"):
        y.backward()
    y = recoup.tiled(module, x, num_tiles=2).sum()
    x.mul_(2)
    with pytest.raises(ReplayError, match="changed in place"):
        y.backward()


class Counts(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.log = how, 0, ["made"]
        self.register_buffer("total", torch.zeros(1))
        self.linear = nn.Linear(H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "attribute":
            self.calls += 1
        elif self.how == "list":
            self.log.append("called")
        elif self.how == "buffer":
            self.total += 1
        return self.linear(x)


@pytest.mark.parametrize("how, why", [("attribute", "`calls`"), ("list", "`log`"), ("buffer", "a buffer")])
def test_state_is_refused_and_left_alone(how: str, why: str) -> None:
    module = Counts(how)
    with pytest.raises(UsageError, match=why):
        recoup.tiled(module, torch.randn(1, 8, H), num_tiles=2)
    assert module.calls == 0 and module.log == ["made"] and module.total.item() == 0
    assert not module._forward_hooks


class _Mode(enum.Enum):
    APART, TOGETHER = 0, 1


class _Changes(nn.Module):
    """Position-wise as it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        self.given: Any = None
        self.function: Callable[[torch.Tensor], torch.Tensor] = F.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.act(self.up(self.function(x))))
        given = self.given
        while isinstance(given, (list, tuple, collections.deque)):
            given = given[-1]
        if isinstance(given, torch.Tensor):
            given = given.numel() > 1
        elif isinstance(given, (dict, types.SimpleNamespace)):
            given = given["mixes"] if isinstance(given, dict) else given.mixes
        return y - y.mean(0, keepdim=True) if given is _Mode.TOGETHER or given in (True, {True}) else y


def _shifts(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)


_CHANGES: dict[str, tuple[str, Any, Any]] = {
    "a flag": ("given", False, True),
    "one of NumPy's": ("given", np.bool_(False), np.bool_(True)),
    "an enum": ("given", _Mode.APART, _Mode.TOGETHER),
    "a list": ("given", [2, False], [2, True]),
    "an enum in a tuple": ("given", (_Mode.APART,), (_Mode.TOGETHER,)),
    "a deque": ("given", collections.deque([False]), collections.deque([True])),
    "a frozen set": ("given", frozenset([False]), frozenset([True])),
    "a dictionary with a tensor": ("given", {"t": torch.ones(2), "mixes": False}, {"t": torch.ones(2), "mixes": True}),
    "a configuration": ("given", types.SimpleNamespace(mixes=False), types.SimpleNamespace(mixes=True)),
    "a tensor of another shape": ("given", torch.ones(1), torch.ones(2)),
    "a function": ("function", F.relu, _shifts),
    "a partial": ("function", functools.partial(torch.clamp, min=0), functools.partial(torch.cumsum, dim=0)),
    "a module": ("act", nn.GELU(), nn.Softmax(0)),
    "a module that draws": ("act", nn.GELU(), nn.Dropout(0.5)),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_what_was_replaced_is_proved_again(change: tuple[str, Any, Any]) -> None:
    name, before, after = change
    module, x = _Changes(), torch.randn(6, 8)
    setattr(module, name, before)
    first = recoup.tiled(module, x, num_tiles=2)
    setattr(module, name, after)
    with pytest.raises(UsageError, match="cannot be run over tiles of positions"):
        recoup.tiled(module, x, num_tiles=2)
    setattr(module, name, before)
    assert torch.equal(recoup.tiled(module, x, num_tiles=2), first)


class _Number(int):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False


def test_attributes_of_all_kinds_are_told_apart_and_not_kept_alive() -> None:
    module, x = _Changes(), torch.randn(6, 8)
    expected = recoup.tiled(module, x, num_tiles=2)
    parent: dict[str, Any] = {}
    parent["child"] = {"parent": parent}
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    odd = [parent, _Number(3), float("nan"), [{1, "a"}], np.ones(3), iter([]), threading.Lock(), range(10**9), [module]]
    for value in [*odd, {"deep": deep}]:
        module.odd = value
        assert torch.equal(recoup.tiled(module, x, num_tiles=2), expected)
    held = torch.ones(3)
    gone = weakref.ref(held)
    module.odd = lambda held=held: held
    recoup.tiled(module, x, num_tiles=2)
    module.odd, held = None, torch.ones(1)
    gc.collect()
    assert gone() is None


def test_a_compiler_runs_the_whole() -> None:
    module, x = nn.Sequential(nn.Linear(8, 16), nn.GELU()), torch.randn(6, 8)
    compiled = torch.compile(lambda x: recoup.tiled(module, x, num_tiles=2), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))


def test_bad_input() -> None:
    x = torch.randn(1, 8, H)
    for keywords in ({}, {"num_tiles": 2, "tile_tokens": 4}, {"num_tiles": 0}, {"tile_tokens": 2.5}):
        with pytest.raises(UsageError, match="num_tiles"):
            recoup.tiled(nn.Linear(H, H), x, **keywords)
    with pytest.raises(UsageError, match="two or more dimensions"):
        recoup.tiled(nn.Linear(H, H), x[0, 0], num_tiles=2)
    with pytest.raises(UsageError, match="along the positions"):
        recoup.tiled(nn.Softmax(1), x, num_tiles=2)
    module = nn.Sequential(nn.Linear(H, H))
    module[0].register_forward_hook(lambda *a: None)
    with pytest.raises(UsageError, match=r"Sequential\.0` has a hook"):
        recoup.tiled(module, x, num_tiles=2)


# -- as a decision ---------------------------------------------------------------------------------------------------


def tiles(tokens: int = 10, depth: int = 2) -> list[Decision]:
    return [TileModule(path=f"layers.{i}.mlp", tile_tokens=tokens) for i in range(depth)]


def gradients(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    loss = net(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in net.parameters())]


@pytest.mark.parametrize(
    "around",
    [
        [],
        [Rederive(path="")],
        [Recompute(path=f"layers.{i}") for i in range(2)],
        [Recompute(path="layers.0", inside="rederive", span=("layers.1",))],
        [Recompute(path="layers.0.norm", span=("layers.0.mlp",))],
        [Recompute(path="layers.0.mlp")],
    ],
    ids=["alone", "rederive", "in regions", "in a span", "ends a span", "is a region"],
)
def test_decision(around: list[Decision]) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 30, H)
    wanted = gradients(net, x)
    before = execution_context.tile_counters()[0]
    with apply_decisions(net, [*around, *tiles()]):
        assert_near(gradients(net, x), wanted, 1e-6)
        with torch.no_grad():
            assert torch.equal(net(x), wanted[0])
    assert execution_context.tile_counters()[0] > before
    assert all(torch.equal(a, b) for a, b in zip(gradients(net, x), wanted, strict=True))
    assert not any("forward" in m.__dict__ for m in net.modules())


def test_a_replay_that_ends_with_it_stops_before_it() -> None:
    torch.manual_seed(0)
    net, x = Net(1), torch.randn(1, 30, H)
    runs: list[int] = []
    act = net.layers[0].mlp.act
    type(act).forward, plain = lambda self, x: runs.append(x.shape[-2]) or plain(self, x), type(act).forward
    try:
        with apply_decisions(net, [Recompute(path="layers.0"), *tiles(10, 1)]):
            net(x)  # proved and compared
            runs.clear()
            net(x).backward()
    finally:
        type(act).forward = plain
    assert runs == [10] * 6  # three tiles forward, and again in backward: none for the region


def test_decision_survives_copies() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 30, H)
    wanted = gradients(net, x)
    with apply_decisions(net, tiles()):
        gradients(net, x)
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            before = execution_context.tile_counters()[0]
            assert_near(gradients(twin, x), wanted, 1e-6)
            assert execution_context.tile_counters()[0] == before + 2


def test_decision_refused_before_anything_changes() -> None:
    net = Net()
    for bad, why in [
        ([*tiles(), Recompute(path="layers.0.mlp.up")], "inside it"),
    ]:
        with pytest.raises(UsageError, match=why):
            apply_decisions(net, bad)
        assert not any("forward" in m.__dict__ for m in net.modules())
    net.layers[0].mlp.act.register_forward_hook(lambda *a: None)
    with pytest.raises(UsageError, match=r"layers\.0\.mlp\.act` has a hook"):
        apply_decisions(net, tiles())


def test_decision_on_what_mixes_positions_says_which_op() -> None:
    net = Net(1)
    with (
        apply_decisions(net, [TileModule(path="layers.0", tile_tokens=8)]),
        pytest.raises(UsageError, match=r"`layers\.0`, a Layer.*`cumsum` works along the positions"),
    ):
        net(torch.randn(2, 30, H))


class LooksAtSize(nn.Module):
    """Position-wise for each size, but another function for each."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-2]
        if self.how == "other ops" and size > 15:
            return self.linear(x).sin()
        return self.linear(x) * (size if self.how == "a number" else torch.full((1,), float(size)))


@pytest.mark.parametrize(
    "how, why",
    [("other ops", "other ops on a tile"), ("a number", "other ops on a tile"), ("a tensor", "other values for 5")],
)
def test_a_function_of_the_number_of_positions_is_refused(how: str, why: str) -> None:
    net = Net(1)
    net.layers[0].mlp = LooksAtSize(how)
    with apply_decisions(net, tiles(10, 1)), pytest.raises(UsageError, match=why):
        net(torch.randn(1, 30, H))


@pytest.mark.parametrize("shape", [(1, H), (1, 1, H), (2, 1, H), (1, 2, H), (5, H)])
@pytest.mark.parametrize("tiles", [{"num_tiles": 4}, {"num_tiles": 5}, {"tile_tokens": 1}, {"tile_tokens": 64}])
def test_a_tile_and_a_call_may_be_of_one_position(shape: tuple[int, ...], tiles: dict[str, int]) -> None:
    torch.manual_seed(0)
    module, x = Gated(), torch.randn(shape)
    results = []
    for run in (module, lambda x: recoup.tiled(module, x, **tiles), lambda x: recoup.tiled(module.forward, x, **tiles)):
        given = x.clone().requires_grad_()
        out = run(given)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), [given, *module.parameters()])))
    for one in results[1:]:
        for a, b in zip(results[0], one, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_batch_of_one_position_runs_under_a_plan() -> None:
    torch.manual_seed(0)
    model = Net()
    with apply_decisions(model, [TileModule(path="layers.0.mlp", tile_tokens=8)]):
        for shape in ((4, 16, H), (1, 1, H), (1, 3, H)):
            model(torch.randn(shape)).backward()
