"""What a step under regions held is let go: its model and its tensors die with the user's last reference to them.

Autograd's graph is in C++, where Python's collector does not see what it holds: a cycle through it is never found.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from recoup.ir.decision import Recompute
from recoup.runtime.apply import apply_decisions
from tests.collector import live_tensors

_FACTOR = "RECOUP_TEST_RELEASED"  # nobody puts the environment back


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).exp()


class _SavesUnwritten(_Plain):
    """Its kernel saves memory that it does not write, and that differs in each run: see `uninitialised.py`."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.full(x.shape, time.perf_counter() % 1e-3)
        out: Tensor = torch.ops.aten.rrelu_with_noise(self.linear(x), noise, 0.1, 0.3, False)
        return out.sin()


class _Drifts(_Plain):
    """Saves other values once the environment says so: with `rrelu`, it takes the whole replay to tell."""

    def forward(self, x: Tensor) -> Tensor:
        factor = float(os.environ.get(_FACTOR, "1"))
        return (functional.rrelu(self.linear(x)) * factor).sin()


class _SavesAnother(_Plain):
    """Saves a tensor of another shape once the environment says so."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).exp()
        return (hidden[:1] if _FACTOR in os.environ else hidden).tanh()


class _Raises(_Plain):
    """Raises once the environment says so."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).exp()
        if _FACTOR in os.environ:
            raise ValueError("no second time")
        return hidden.tanh()


class _Keeps(_Plain):
    """Keeps its last result, and a part of it keeps its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Plain()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.inner.last = self.inner(x)
        self.last = torch.tanh(self.linear(self.inner.last)).exp()
        return self.last


class _KeepsList(_Plain):
    """Keeps its last results in a list that is new each time."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Tensor] = []
        self.register_buffer("state", torch.zeros(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(x)).exp()
        self.results = [hidden, hidden.sin()]
        self.state = hidden.cos()
        return hidden


class _Store:
    """An object of no known type."""

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self.nested: dict[str, Any] = {"of": {"last": None}}


class _KeepsElsewhere(_Plain):
    """Keeps its last result in an object and in a dict in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.store = _Store()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(x)).exp()
        self.store.last = hidden.sin()
        self.store.nested["of"]["last"] = hidden.cos()
        return hidden


class _KeepsAndChanges(_Plain):
    """Changes in place what the forward before has left, with its graph, in a list and in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.results = _Store(), [torch.zeros(8, 16)]
        self.store.last = torch.zeros(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(x))
        for past in (self.results[0], self.store.last):
            hidden = hidden + past.mul_(0.5)
        hidden = hidden.sin()
        self.store.last, self.results = hidden * 2.0, [hidden * 3.0]
        return hidden


class _InPlace(_Plain):
    """Changes its argument in place."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.mul_(2.0))).exp()


def _here(run: Callable[[], None]) -> None:
    run()


def _on_a_thread(run: Callable[[], None]) -> None:
    """Runs it as an engine's thread would: one that stays, and holds what it last held."""
    _threads[0].submit(run).result()


_threads: list[ThreadPoolExecutor] = []


@pytest.fixture(autouse=True)
def _a_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(_FACTOR, raising=False)
    with ThreadPoolExecutor(1) as thread:
        _threads.append(thread)
        yield
        _threads.clear()


def _model(kind: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), kind(), nn.Linear(16, 16))


def _plan(model: nn.Sequential, **options: Any) -> Any:
    return apply_decisions(model, [Recompute(path="1", **options)])


def _loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randn(8, 16)).sum()
    return loss


def _drop(loss: Tensor) -> None:
    pass


def _trained(kind: type[nn.Module], run: Callable[[Callable[[], None]], None]) -> list[weakref.ref[Any]]:
    model = _model(kind)
    with _plan(model):
        for _ in range(3):
            loss = _loss(model)
            run(loss.backward)
    return [weakref.ref(model), weakref.ref(model[1])]


def _fails(kind: type[nn.Module], run: Callable[[Callable[[], None]], None]) -> list[weakref.ref[Any]]:
    model = _model(kind)
    errors = []

    def backward() -> None:
        try:
            loss.backward()
        except RuntimeError as error:
            errors.append(str(error))

    with _plan(model):
        loss = _loss(model)
        os.environ[_FACTOR] = "2"
        run(backward)
        del os.environ[_FACTOR]
    assert len(errors) == 1
    return [weakref.ref(model), weakref.ref(model[1])]


def _fails_at_once(kind: type[nn.Module], run: Callable[[Callable[[], None]], None]) -> list[weakref.ref[Any]]:
    model = _model(kind)

    def forward() -> None:
        try:
            _loss(model)
        except ValueError:
            raised.append(True)

    raised: list[bool] = []
    with _plan(model):
        _loss(model).backward()
        os.environ[_FACTOR] = "2"
        run(forward)
        del os.environ[_FACTOR]
    assert raised
    return [weakref.ref(model), weakref.ref(model[1])]


def _only_forward(kind: type[nn.Module], run: Callable[[Callable[[], None]], None]) -> list[weakref.ref[Any]]:
    model = _model(kind)
    with _plan(model):
        for _ in range(3):
            run(lambda: _drop(_loss(model)))
    return [weakref.ref(model), weakref.ref(model[1])]


def _removed_between(kind: type[nn.Module], run: Callable[[Callable[[], None]], None]) -> list[weakref.ref[Any]]:
    model = _model(kind)
    applied = _plan(model)
    loss = _loss(model)
    applied.remove()
    run(loss.backward)
    return [weakref.ref(model), weakref.ref(model[1])]


def _without_grad(kind: type[nn.Module], run: Callable[[Callable[[], None]], None]) -> list[weakref.ref[Any]]:
    model = _model(kind)
    with _plan(model):
        run(torch.no_grad()(lambda: _drop(_loss(model))))
    return [weakref.ref(model), weakref.ref(model[1])]


def _twice(kind: type[nn.Module], run: Callable[[Callable[[], None]], None]) -> list[weakref.ref[Any]]:
    model = _model(kind)
    with _plan(model):
        loss = _loss(model)
        run(lambda: loss.backward(retain_graph=True))
        run(loss.backward)
    return [weakref.ref(model), weakref.ref(model[1])]


CASES = {
    "trained": (_trained, (_Plain, _SavesUnwritten, _Keeps)),
    "fails": (_fails, (_Drifts, _SavesAnother, _Raises)),
    "fails at once": (_fails_at_once, (_Raises,)),
    "only forward": (_only_forward, (_Plain, _SavesUnwritten, _KeepsList, _InPlace)),
    "removed between": (_removed_between, (_Plain, _SavesUnwritten, _Keeps)),
    "without grad": (_without_grad, (_Plain, _Keeps)),
    "twice": (_twice, (_Plain, _SavesUnwritten, _Keeps)),
}


def test_what_was_left_with_its_graph_may_be_changed_in_place() -> None:
    torch.manual_seed(0)
    model, x = _model(_KeepsAndChanges), torch.randn(8, 16)

    def grads(*, planned: bool) -> list[Tensor]:
        own = copy.deepcopy(model)
        with _plan(own) if planned else contextlib.nullcontext():
            own(x)
            own(x).sum().backward()
        return [p.grad for p in own.parameters() if p.grad is not None]

    assert all(map(torch.equal, grads(planned=True), grads(planned=False)))


def test_a_removed_plan_holds_none_of_the_models_objects() -> None:
    model = _model(_Plain)
    model[1].store = _Store()
    applied = _plan(model)
    _loss(model).backward()
    applied.remove()  # the plan itself is still there
    store = weakref.ref(model[1].store)
    model[1].store = None
    gc.collect()
    assert store() is None


@pytest.mark.parametrize("kind", [_Plain, _Keeps, _KeepsList, _KeepsElsewhere])
def test_forwards_without_backward_do_not_add_up(kind: type[nn.Module]) -> None:
    model = _model(kind)
    alive = []
    with _plan(model):
        for _ in range(6):
            _loss(model)
            gc.collect()
            alive.append(live_tensors())
    assert alive[2:] == alive[2:3] * 4


@pytest.mark.parametrize("run", [_here, _on_a_thread])
@pytest.mark.parametrize(("case", "kind"), [(case, kind) for case, (_, kinds) in CASES.items() for kind in kinds])
def test_a_model_dies_with_its_last_reference(case: str, kind: type[nn.Module], run: Any) -> None:
    gc.collect()
    before = live_tensors()
    dead = CASES[case][0](kind, run)
    gc.collect()
    assert [ref() for ref in dead] == [None, None]
    assert live_tensors() == before
