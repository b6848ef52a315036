"""A call of a program is told from one that differs in an argument alone, and from none that is equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recoup.evidence.gradients import equal_values
from recoup.ir.decision import Decision, Rebuild, Rederive
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild import held_recorder, saved_tensor
from recoup.runtime.rebuild.call_code import Nest, Place, is_like, items_of
from recoup.runtime.rebuild.step_run import StepRun

WIDTH, NUM_STEPS, DIFFERS_FROM = 16, 7, 4
Call = Callable[[Tensor, Tensor], Tensor]
RAMP = torch.linspace(0, 1, WIDTH).expand(WIDTH, WIDTH).contiguous()

DIFFERENT: dict[str, tuple[Call, Call]] = {
    "one slice": (lambda a, b: a[:8], lambda a, b: a[8:]),
    "slices": (lambda a, b: a[:, 0:8], lambda a, b: a[:, 4:12]),
    "step of a slice": (lambda a, b: a[:, ::2], lambda a, b: a[:, :8]),
    "a number among slices": (lambda a, b: a[:, 3], lambda a, b: a[:, 4]),
    "number and its negative": (lambda a, b: a[3], lambda a, b: a[-3]),
    "place of None": (lambda a, b: a[:, None].sum(1), lambda a, b: a[None].sum(0).t()),
    "tensors of a list": (lambda a, b: torch.cat([a, b]), lambda a, b: torch.cat([b, a])),
    "one of them twice": (lambda a, b: torch.stack([a, b], 1), lambda a, b: torch.stack([a, a], 1)),
    "how many of them": (lambda a, b: torch.cat([a, b])[:WIDTH], lambda a, b: torch.cat([a, b, b])[:WIDTH]),
    "dim behind a list": (lambda a, b: torch.cat([a, b], 0)[:8, :8], lambda a, b: torch.cat([a, b], 1)[:8, :8]),
    "a tensor twice": (lambda a, b: a * b, lambda a, b: a * a),
    "order": (lambda a, b: a - b, lambda a, b: b - a),
    "a tensor for a number": (lambda a, b: a * 2.0, lambda a, b: a * b),
    "by name": (lambda a, b: torch.sum(a, dim=0), lambda a, b: torch.sum(a, dim=1)),
    "name": (lambda a, b: torch.add(a, b, alpha=2), lambda a, b: torch.add(a, other=b, alpha=3)),
    "names, their order": (
        lambda a, b: torch.clamp(a, min=-0.5, max=0.25),
        lambda a, b: torch.clamp(a, max=-0.5, min=0.25),
    ),
    "sign of zero": (lambda a, b: torch.atan2(a * 0.0, -b.exp()), lambda a, b: torch.atan2(a * -0.0, -b.exp())),
    "kind of a number": (lambda a, b: a.sum(0, keepdim=False), lambda a, b: a.sum(1, keepdim=False)),
    "sizes": (lambda a, b: a.view(2, 8, 16).sum(0), lambda a, b: a.view(8, 2, 16).sum(1)),
    "order of dims": (lambda a, b: a.permute(0, 1) + b, lambda a, b: a.permute(1, 0) + b),
}
EQUAL: dict[str, Call] = {
    "slices": lambda a, b: a[:, 0:8],
    "one slice": lambda a, b: a[2:],
    "an ellipsis": lambda a, b: a[..., None],
    "a list of tensors": lambda a, b: torch.cat([a, b], dim=-1),
    "a tuple of tensors": lambda a, b: torch.cat((-a[..., 8:], b[..., :8]), dim=-1),
    "a number made anew": lambda a, b: a * (1.0 / float(WIDTH + len(b)) ** 0.5),
    "a size": lambda a, b: a.view(a.shape) + b.expand(a.size()),
    "sizes": lambda a, b: a.view([4, 4, -1]),
    "by name": lambda a, b: torch.add(input=a, other=b, alpha=float(len(b)) / 3),
    "a tensor that no call returned": lambda a, b: torch.cat([a, RAMP]) * RAMP[0] + RAMP[1],
    "what leads to nothing": lambda a, b: (torch.exp(b[:1, :1] * 2), a * 2)[1],
}
KEY: tuple[list[int]] = ([0, 1],)


def _key(number: int) -> Any:
    KEY[0][0] = number
    return KEY


DIFFERENT["a list in the very same tuple"] = (lambda a, b: a[_key(0)], lambda a, b: a[_key(2)])
PLANS: dict[str, Decision] = {"rebuild": Rebuild(path=""), "rederive": Rederive(path="")}


class _Model(nn.Module):
    def __init__(self, calls: tuple[Call, Call]) -> None:
        super().__init__()
        self.calls = calls
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.i = 0

    def forward(self, x: Tensor) -> Tensor:
        call = self.calls[self.i >= DIFFERS_FROM]
        self.i += 1
        b = torch.exp(self.second(x))
        made = torch.sin(call(torch.tanh(self.first(x)), b) * 3)
        return torch.cos(made).exp().square().mean() + b.mean()


def _train(calls: tuple[Call, Call], decisions: list[Decision]) -> tuple[list[Tensor], int]:
    torch.manual_seed(0)
    model, x, found = _Model(calls), torch.randn(WIDTH, WIDTH), []
    with apply_decisions(model, decisions) as applied:
        for _ in range(NUM_STEPS):
            model.zero_grad()
            loss = model(x)
            loss.backward()
            found += [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
    return found, applied.log.num_rederived


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step that began with a program kept to it."""
    monkeypatch.setattr(held_recorder, "MIN_BYTES", 0)
    monkeypatch.setattr(saved_tensor, "MIN_BYTES", 0)
    found: list[bool] = []
    real, close = StepRun.__init__, StepRun.close

    def begin(self: StepRun, *args: Any) -> None:
        real(self, *args)
        found.append(False)

    def end(self: StepRun) -> None:
        found[-1] = self.is_done
        close(self)

    monkeypatch.setattr(StepRun, "__init__", begin)
    monkeypatch.setattr(StepRun, "close", end)
    return found


@pytest.mark.filterwarnings("ignore:.*took a step that its plan was not made for.*")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", DIFFERENT)
def test_a_call_with_another_argument_is_another_call(kind: str, plan: str, followed: list[bool]) -> None:
    plain, _ = _train(DIFFERENT[kind], [])
    planned, num_rederived = _train(DIFFERENT[kind], [PLANS[plan]])
    assert all(map(equal_values, plain, planned))
    assert num_rederived
    assert True in followed
    assert False in followed or plan == "rederive"  # where nothing may rest on it


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", EQUAL)
def test_an_equal_call_is_the_programs(
    kind: str, plan: str, followed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []
    real = StepRun.next_call
    monkeypatch.setattr(StepRun, "next_call", lambda self, *call: looked.append(call[0]) or real(self, *call))
    plain, _ = _train((EQUAL[kind],) * 2, [])
    planned, num_rederived = _train((EQUAL[kind],) * 2, [PLANS[plan]])
    assert all(map(equal_values, plain, planned))
    assert num_rederived
    assert followed and all(followed)
    assert not looked, "every call has its code"


def test_items() -> None:
    a, b = torch.ones(2), torch.ones(3)
    found = items_of((a, [b, a, 1], (2, 3), [4], slice(None, 2), 0.5, None), [a, b])
    assert found is not None
    first, nest, *rest = found
    assert isinstance(first, Place) and isinstance(nest, Nest)
    assert (first.number, nest.kind, [p.number for p in nest.parts[:2]], nest.parts[2]) == (0, list, [1, 0], 1)
    assert rest == [(2, 3), [4], slice(None, 2), 0.5, None]
    nested = items_of((((1, 2), 3),), [])
    assert nested is not None and isinstance(nested[0], Nest)
    assert items_of((object(),), []) is None and items_of((slice(None, a),), [a]) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.0, -0.0), (1, 1.0), (1, True), ([1], (1,)), ([0.0, 1], [-0.0, 1]), ((1, 2), (1, True)), (slice(1), slice(2))],
)
def test_what_is_equal_but_not_alike(one: Any, other: Any) -> None:
    assert is_like(one, one) and not is_like(one, other) and not is_like(other, one)
