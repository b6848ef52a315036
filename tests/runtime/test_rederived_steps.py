"""Steps under a plan that only rederives: those that are alike follow a program, others are recorded."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recoup.evidence.gradients import equal_values
from recoup.ir.decision import Rederive
from recoup.runtime.apply import Applied, apply_decisions
from recoup.runtime.rebuild.rederive_steps import RederiveCalls, RederiveRun


class Block(nn.Module):
    """A pre-norm block with what a test varies.

    Attributes:
        kind: "plain", or what its forward does otherwise. seen: whether it does so now.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.kind = kind
        self.is_other = False

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.norm(x))) * (1.5 if self.is_other and self.kind == "scalar" else 0.5)
        if self.is_other and self.kind == "function":
            h = torch.tanh(h)
        if self.is_other and self.kind == "in place":
            h.mul_(2)
        if self.is_other and self.kind == "data":
            h.data.mul_(0.25)
        if self.is_other and self.kind == "parameter":
            self.norm.weight.data.add_(0.125)
        if self.is_other and self.kind == "tensor":
            h = h * torch.sigmoid(h + 0)
        return x + self.down(torch.sin(h))


def train(kind: str, others: set[int], plan: bool) -> tuple[list[Tensor | str], Applied, list[int]]:
    """Returns what some steps of two blocks give, with the second one going another way in `others`."""
    torch.manual_seed(0)
    model = nn.Sequential(Block("plain"), Block(kind), nn.Linear(32, 1))
    applied = apply_decisions(model, [Rederive(path="")] if plan else [])
    found: list[Tensor | str] = []
    num_followed: list[int] = []
    for i in range(7):
        model[1].is_other = i in others
        x = torch.randn(64, 32)
        try:
            model(x).square().mean().backward()
        except RuntimeError as error:
            found.append(type(error).__name__)
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        num_followed.append(applied.log.num_rederived)
    return found, applied, num_followed


def programs_of(applied: Applied) -> int:
    """Returns how many programs a plan has."""
    calls = getattr(applied._state, "rederived_calls", None)
    assert isinstance(calls, RederiveCalls)
    return len(calls._programs)


@pytest.mark.parametrize("kind", ["plain", "scalar", "function", "in place", "data", "parameter", "tensor"])
def test_a_step_that_goes_another_way_is_recorded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[bool] = []
    real = RederiveRun.__init__

    def init(self: RederiveRun, *args: object) -> None:
        real(self, *args)  # type: ignore[arg-type]
        followed.append(True)

    monkeypatch.setattr(RederiveRun, "__init__", init)
    plain, _, _ = train(kind, {4, 6}, plan=False)
    planned, applied, num_rederived = train(kind, {4, 6}, plan=True)
    assert len(plain) == len(planned)
    for a, b in zip(plain, planned, strict=True):
        assert a == b if isinstance(a, str) or isinstance(b, str) else equal_values(a, b)
    assert followed
    assert num_rederived[3] - num_rederived[2] == num_rederived[0] > 0  # as many with a program as with a record
    if kind == "plain":
        assert len(followed) == 5
        assert programs_of(applied) == 1
        assert copy.deepcopy(applied._state).rederived_calls is not applied._state.rederived_calls  # type: ignore[union-attr]


def test_steps_whose_graphs_live_side_by_side() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block("plain"), Block("plain"))
    twin = copy.deepcopy(model)
    apply_decisions(model, [Rederive(path="")])
    batches = [torch.randn(64, 32) for _ in range(6)]
    for each in (model, twin):
        for x in batches[:3]:
            each(x).sum().backward()
        losses = [each(x).square().sum() for x in batches]
        for loss in losses[::-2] + losses[::2]:
            loss.backward(retain_graph=True)
        for loss in losses:
            loss.backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert equal_values(a.grad, b.grad)
