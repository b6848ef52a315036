"""Torch's own small modules run past the recorder once they are known: what differs still counts as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recoup.evidence.gradients import equal_values
from recoup.ir.decision import OpMark, Rebuild, Rederive
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild import held_recorder
from recoup.runtime.rebuild.held_recorder import HeldRecorder

ROWS, WIDTH = 16, 32


class _Model(nn.Module):
    def __init__(self, change: Callable[[_Model, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.act, self.gate = nn.GELU(), nn.SiLU()
        self.change = change
        self.i = 0

    def forward(self, x: Tensor) -> Tensor:
        self.i += 1
        if self.change is not None:
            x = self.change(self, x)
        y = self.act(self.first(torch.sin(x)))
        if self.i == 7:
            y.mul_(0.5)
        out: Tensor = torch.tanh(self.second(y) * self.gate(y + 0))
        return out.square().mean()


def _same(model: _Model, x: Tensor) -> Tensor:
    return x


def _geometry(model: _Model, x: Tensor) -> Tensor:
    return {4: x[2:], 5: x.view(2, 8, WIDTH), 6: x.t().contiguous().t()}.get(model.i, x)


def _offset(model: _Model, x: Tensor) -> Tensor:
    return torch.cat([x, x.cos()])[model.i : ROWS + model.i]


def _attributes(model: _Model, x: Tensor) -> Tensor:
    model.act.approximate = "tanh" if model.i > 4 else "none"
    model.gate.inplace = model.i == 6
    return x


def _weights(model: _Model, x: Tensor) -> Tensor:
    if model.i == 4:
        model.first.weight.data = model.first.weight.data * 2
    if model.i == 5:
        model.first.weight.data.mul_(0.5)
    if model.i == 6:
        model.first.bias = None
    if model.i == 7:
        model.second.weight = nn.Parameter(torch.eye(WIDTH))
    return x


def _shadowed(model: _Model, x: Tensor) -> Tensor:
    if model.i > 4:  # what is found first is no parameter
        model.first.__dict__["weight"] = model.second.weight * 2 + 1
    return x


def _own_forward(model: _Model, x: Tensor) -> Tensor:
    if model.i > 4:
        model.act.__class__ = _OwnGELU
    return x


class _OwnGELU(nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        input.data.mul_(0.5)
        return torch.relu(input) * 2


def _hook(model: _Model, x: Tensor) -> Tensor:
    if model.i == 4:
        model.first.register_forward_hook(lambda module, args, out: out.mul_(2).exp())
        model.gate.register_forward_pre_hook(lambda module, args: (args[0].clone().add_(1),))
    return x


def _replaced(model: _Model, x: Tensor) -> Tensor:
    if model.i == 4:
        model.first.forward = lambda input: F.linear(input.cos(), model.first.weight)
    return x


CHANGES = [_same, _geometry, _offset, _attributes, _weights, _shadowed, _own_forward, _hook, _replaced]


class _Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.addmm.default else out


def _train(change: Any, decisions: list[Any], *, autocast: bool = False, doubles: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    model = _Model(change)
    applied = apply_decisions(model, decisions)
    found = []
    for i in range(8):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and i > 3):
            if doubles and i > 3:
                with _Doubles():
                    loss = model(x)
            else:
                loss = model(x)
        loss.backward(retain_graph=True)
        loss.backward()
        found += [loss.detach(), *[p.grad.clone() for p in [x, *model.parameters()] if p.grad is not None]]
    assert not decisions or applied.log.num_rederived > 0
    applied.remove()
    return found


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_recorder, "MIN_BYTES", 0)


@pytest.mark.filterwarnings("ignore:.*took a step that its plan was not made for.*")
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_from_the_step_before(change: Any, marked: bool) -> None:
    marks = (OpMark(path="second", call=0, ordinal=0, op="aten.mm.default", holds=True),) if marked else ()
    plain, planned = _train(change, []), _train(change, [Rebuild(path="", marks=marks)])
    assert len(plain) == len(planned)
    assert all(map(equal_values, plain, planned))


@pytest.mark.filterwarnings("ignore:.*took a step that its plan was not made for.*")
@pytest.mark.parametrize("surroundings", [{"autocast": True}, {"doubles": True}])
def test_what_differs_around_the_step(surroundings: dict[str, bool]) -> None:
    plain, planned = (_train(_same, decisions, **surroundings) for decisions in ([], [Rebuild(path="")]))
    assert all(map(equal_values, plain, planned))


def test_a_function_put_in_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch._C._nn.linear(x.cos(), weight, bias)

    def change(model: _Model, x: Tensor) -> Tensor:
        monkeypatch.setattr(F, "linear", linear if model.i > 4 else torch._C._nn.linear)
        return x

    plain = _train(change, [])
    assert all(map(equal_values, plain, _train(change, [Rebuild(path="")])))


@pytest.mark.parametrize(
    "mark", [{}, {"holds": True}, {"begins_segment": True}, {"begins_segment": True, "saves": True}]
)
def test_known_calls_pass_the_recorder_and_are_rebuilt_as_much(
    mark: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = HeldRecorder.__torch_dispatch__

    def dispatch(self: HeldRecorder, func: Any, *rest: Any) -> Any:
        seen.append(str(func))
        return real(self, func, *rest)

    monkeypatch.setattr(HeldRecorder, "__torch_dispatch__", dispatch)
    marks = (OpMark(path="second", call=0, ordinal=0, op="aten.mm.default", **mark),) if mark else ()
    model, x = _Model(), torch.randn(ROWS, WIDTH, requires_grad=True)
    rebuilt, numbers = [], []
    with apply_decisions(model, [Rebuild(path="", marks=marks)]) as applied:
        for _ in range(6):
            seen.clear()
            before = applied.log.num_rederived
            model(x).backward()
            rebuilt.append(applied.log.num_rederived - before)
            numbers.append(len(seen))
    assert rebuilt == [rebuilt[0]] * 6
    assert numbers[2] == numbers[5] == 0 < numbers[0]


class _ReadsTwice(nn.Module):
    """Reads its input in two segments, by calls that are alike: the second is known from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return sum(torch.tanh(x * 2.0) @ w for w in self.weights)  # type: ignore[return-value]


def test_what_a_known_call_reads_is_held_for_the_segment_that_it_begins() -> None:
    model, x = _ReadsTwice(), torch.randn(256, 64)
    marks = tuple(OpMark(path="", call=0, ordinal=i, op="aten.mul.Tensor", begins_segment=True) for i in (0, 3))
    with apply_decisions(model, (Rebuild(path="", marks=marks),)) as applied:
        for _ in range(4):
            before = applied.log
            model(x).sum().backward()
            assert (applied.log - before).num_rederived == 2  # both inputs of the products


class _Tanh(torch.autograd.Function):
    """Calls tanh below autograd, and saves nothing of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.tanh(x) + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _TwoModes(nn.Module):
    """Takes the same calls with and without gradients: what they save differs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        with torch.no_grad():
            constant = torch.sin(x)
        out: Tensor = _Tanh.apply(x) + torch.tanh(x) + torch.sin(x) + constant
        return out


def test_a_call_known_without_gradients_is_another_with_them() -> None:
    model, x = _TwoModes(), torch.randn(256, 64)
    with apply_decisions(model, (Rebuild(path=""),)) as applied:
        for _ in range(4):
            before = applied.log
            model(x).sum().backward()
            assert (applied.log - before).num_rederived == 2  # what tanh and sin save of their calls with gradients


class _Graph(nn.Module):
    """Mixes rows by a sparse matrix, which autograd saves."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.mixing = torch.eye(64).to_sparse(layout=layout)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.sparse.mm(self.mixing, torch.tanh(self.net(x)) * 2)
        return self.net(torch.relu(mixed)).sum()  # type: ignore[no-any-return]  # of a module, anything


class _Transformed(nn.Module):
    """A field whose derivatives the forward takes by transforms, before and after calls of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y, ones = self.net(x).sum(), torch.ones_like(x)
        func = torch.func
        if self.how == "vmap(hessian)":
            found = func.vmap(func.hessian(lambda row: self.net(row).sum()))(x)
        elif self.how == "jvp":
            found = func.jvp(self.net, (x,), (ones,))[1]
        else:
            out, pull = func.vjp(lambda t: func.jvp(self.net, (t,), (ones,))[1], x)
            found = pull(torch.ones_like(out))[0]
        total: Tensor = y + torch.tanh(found).sum() + self.net(x).sum()
        return total


@pytest.mark.parametrize("plan", [Rebuild(path=""), Rederive(path="")])
@pytest.mark.parametrize(
    "make",
    [
        *[functools.partial(_Transformed, how) for how in ("vmap(hessian)", "jvp", "vjp of a jvp")],
        *[functools.partial(_Graph, layout) for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)],
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_tensors_without_a_storage_in_a_forward(make: Callable[[], nn.Module], plan: Rebuild | Rederive) -> None:
    torch.manual_seed(0)
    model = make()
    x = torch.randn(64, 8 if isinstance(model, _Transformed) else WIDTH)

    def step() -> list[Any]:
        model.zero_grad()
        model(x).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = step()
    with apply_decisions(model, (plan,)):
        for _ in range(4):
            assert all(map(equal_values, plain, step()))
