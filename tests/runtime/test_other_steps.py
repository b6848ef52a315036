"""Steps that run other ops than the planned one: more, fewer, or others from some call on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from recoup.api import plan
from recoup.evidence.gradients import equal_values
from recoup.evidence.memory import measure_peak
from recoup.ir.decision import OpMark, Rebuild
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild.realigned import realigned

ROWS, WIDTH = 256, 64


def _mark(ordinal: int, op: str, **what: bool) -> OpMark:
    return OpMark(path="", call=0, ordinal=ordinal, op=op, **what)


class _Rounds(nn.Module):
    """Some layers behind a loop of so many rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.12) for _ in range(8))
        self.num_rounds = 3

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        for _ in range(self.num_rounds):
            h = torch.tanh(0.5 * h + x)
        for weight in self.weights:
            h = torch.tanh(h + torch.sigmoid(h @ weight) * 0.5)
        return h.square().mean()


@pytest.mark.parametrize("num_rounds", [2, 5])
def test_a_step_with_other_ops_takes_the_plan_from_where_it_is_as_planned(num_rounds: int) -> None:
    torch.manual_seed(0)
    model, x = _Rounds(), torch.randn(16 * ROWS, WIDTH)
    made = plan(model, x, budget="50%", actions=["rebuild"])
    assert isinstance(made.decisions[-1], Rebuild) and any(mark.holds for mark in made.decisions[-1].marks)
    held_bytes = 8 * model.weights[0].nbytes + x.nbytes
    excess = []
    with apply_decisions(model, made.decisions):
        for i in range(12):
            model.num_rounds = num_rounds if i in (2, 3, 4, 5, 6, 9, 10) else 3
            step = lambda: model(x).backward()  # noqa: E731
            peak = measure_peak(step, device=torch.device("cpu"), held_bytes=held_bytes)
            excess.append((peak - made.predicted.peak_bytes) / x.nbytes)
            model.zero_grad()
    # One that leaves its program holds what it was handed there, the first other one what its new ops make.
    new = max(num_rounds - 3, 0)
    assert max(excess) <= 1.1 + 1.5 * new
    assert max(excess[3:7]) <= 0.1 + new / 2


class _Selecting(nn.Module):
    """Selects other rows in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.13) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = ((x @ self.weights[0] * 0.3).exp_() * 0.3).exp_()
        y = torch.tanh(x + y) @ self.weights[1]
        rows = (y.detach()[:, 0] > 0).nonzero()[:, 0]
        y = y.index_add(0, rows, torch.tanh(y[rows]))
        y = torch.relu_(y.view(-1, 4, WIDTH)).view(-1, WIDTH)
        return (y * 0.5 @ self.weights[2]).square().mean()


def test_what_a_piece_starts_from_is_not_asked_for_where_the_program_ended_before_it() -> None:
    marks = (
        _mark(0, "aten.mm.default", begins_segment=True, begins_piece=True),
        _mark(3, "aten.mul.Tensor", is_joint=True),
        _mark(4, "aten.exp_.default", begins_piece=True),
        _mark(10, "aten.tanh.default", is_joint=True),
        _mark(12, "aten.relu_.default", begins_piece=True, is_joint=True),
        _mark(13, "aten.mul.Tensor", holds=True),
    )
    found = []
    for decisions in ([], [Rebuild(path="", marks=marks)]):
        torch.manual_seed(0)
        model, gradients = _Selecting(), []
        with apply_decisions(model, decisions):
            for _ in range(8):
                model(torch.randn(ROWS, WIDTH)).backward()
                gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                model.zero_grad()
        found.append(gradients)
    assert all(map(equal_values, *found))


@pytest.mark.parametrize(
    ("names", "met"),
    [
        ("abcabdab", {1: "b", 3: "a", 5: "d", 7: "b"}),  # as planned
        ("cabdab", {1: "a", 3: "d", 5: "b"}),  # two fewer, the first marked op among them
        ("zzabcabdab", {3: "b", 5: "a", 7: "d", 9: "b"}),  # two more
        ("abcab", {1: "b", 3: "a", 4: "b"}),  # without the d
        ("xyz", {}),
    ],
)
def test_where_marks_lie_in_a_call_with_other_ops(names: str, met: dict[int, str]) -> None:
    marks = [_mark(1, "b"), _mark(3, "a"), _mark(5, "d"), _mark(7, "b")]
    found = realigned(marks, [*names])
    assert {at: mark.op for at, mark in found.items()} == met
    assert all(at == mark.ordinal for at, mark in found.items())
