"""A plan by tensor knows its ops from the step before: what differs since then still counts as it is."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from recoup.evidence.gradients import equal_values
from recoup.ir.decision import Rebuild
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild import known_calls
from recoup.runtime.rebuild.held_recorder import HeldRecorder

ROWS, WIDTH = 64, 32
Step = Callable[[Tensor, Tensor, int], Tensor]


def _scalars(x: Tensor, w: Tensor, i: int) -> Tensor:
    return F.softplus(x * w, beta=1.0 + i) * (2 if i % 2 else 2.0) + x.sum(-1, keepdim=True)


def _geometry(x: Tensor, w: Tensor, i: int) -> Tensor:
    y = torch.tanh(torch.cat([x, x * w], -1))
    z = y[:, :WIDTH] if i < 2 else y[:, i : WIDTH + i]  # the same sizes and strides further in
    return torch.sin(z) * torch.cos(z.t() if i == 3 else z).reshape(z.shape)


def _kinds(x: Tensor, w: Tensor, i: int) -> Tensor:
    y = F.layer_norm(x.sin(), (WIDTH,), w if i % 2 else None, None if i % 2 else w[:1].expand(WIDTH).contiguous())
    y = (y.double() if i == 2 else y).exp().float()
    return torch.clamp(y, max=3.0) if i < 2 else torch.clamp(y, max=w)


def _ways(x: Tensor, w: Tensor, i: int) -> Tensor:
    a, b = torch.sigmoid(x * w), torch.tanh(x + w)
    return torch.exp(a if i % 2 else b) * (a * a if i < 3 else a * b)


def _behind_autograd(x: Tensor, w: Tensor, i: int) -> Tensor:
    y = torch.sin(x * w)
    if i == 2:
        y.data = torch.cos(x.detach())
    z = torch.exp(y)
    if i == 3:
        y.data.mul_(2)
    return z * torch.tanh(y)


class _Model(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.w = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.i = 0

    def forward(self, x: Tensor) -> Tensor:
        out = self.step(x, self.w, self.i).square().mean()
        self.i += 1
        return out


class _Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _train(step: Step, decisions: list[Any]) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    model = _Model(step)
    applied = apply_decisions(model, decisions)
    found = []
    for _ in range(5):
        loss = model(x)
        loss.backward()
        assert x.grad is not None
        assert model.w.grad is not None
        found += [loss.detach(), x.grad.clone(), model.w.grad.clone()]
    if decisions:
        assert applied.log.num_rederived > 0
    applied.remove()
    return found


@pytest.mark.filterwarnings("ignore:.*took a step that its plan was not made for.*")
@pytest.mark.parametrize("step", [_scalars, _geometry, _kinds, _ways, _behind_autograd])
def test_what_differs_from_the_step_before(step: Step) -> None:
    assert all(map(equal_values, _train(step, []), _train(step, [Rebuild(path="")])))


def test_steps_that_are_alike_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    real = HeldRecorder._run

    def run(self: HeldRecorder, facts: Any, *rest: Any) -> Any:
        looked.append(facts.label)
        return real(self, facts, *rest)

    monkeypatch.setattr(HeldRecorder, "_run", run)
    model = _Model(lambda x, w, i: torch.tanh(F.linear(torch.sin(x * w), w.expand(4, WIDTH))))
    x = torch.randn(ROWS, WIDTH)
    with apply_decisions(model, [Rebuild(path="")]):
        model(x).backward()
        assert len(looked) > 6
        looked.clear()
        model(x).backward()
        assert looked == []


def test_a_record_holds_no_tensor() -> None:
    read: list[weakref.ref[torch.UntypedStorage]] = []

    def step(x: Tensor, w: Tensor, i: int) -> Tensor:
        for op in (lambda y: F.layer_norm(y, (WIDTH,), w), lambda y: torch.clamp(w, max=y)):  # between them is a scalar
            y = torch.sin(x * w)
            read.append(weakref.ref(y.untyped_storage()))
            x = op(y)
        return x

    model = _Model(step)
    x = torch.randn(ROWS, WIDTH)
    with apply_decisions(model, [Rebuild(path="")]):
        for _ in range(3):
            loss = model(x)
            assert [ref() for ref in read[-2:]] == [None, None]
            loss.backward()


def test_calls_inside_of_the_users_checkpoint_are_known_apart() -> None:
    """What autograd saves in them goes to the checkpoint; that of equal calls outside is rebuilt all the same."""

    def step(x: Tensor, w: Tensor, i: int) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(torch.exp(y * w) + 1), x, use_reentrant=False)
            x = torch.tanh(torch.exp(x * w) + 1)
        return x

    model, x = _Model(step), torch.randn(ROWS, WIDTH)
    rebuilt = []
    with apply_decisions(model, [Rebuild(path="")]) as applied:
        for i in range(5):
            before = applied.log.num_rederived
            with _Ops() if i == 0 else contextlib.nullcontext():  # behind it no call is known
                loss = model(x)
            loss.backward()
            rebuilt.append(applied.log.num_rederived - before)
    assert rebuilt[0] > 0
    assert len(set(rebuilt)) == 1


def test_what_differs_each_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_calls, "MOST_REMEMBERED_ANSWERS", 2)
    model = _Model(lambda x, w, i: torch.tanh(x * w * (i + 2)))
    x = torch.randn(ROWS, WIDTH)
    with apply_decisions(model, [Rebuild(path="")]) as applied:
        for _ in range(8):
            model(x).backward()
        calls = applied._state.calls  # type: ignore[attr-defined]
    assert not calls._programs
    assert max(calls._num_forms.values()) == 4  # with so many numbers, of so many tensors
