from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.ir.decision import LossInPlace, Rebuild
from recoup.ir.trace import Trace
from recoup.planner.request import planner_for
from recoup.planner.strategies.rebuild import RebuildStrategy
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild.calls import CallWatch
from recoup.solver.segment_labels import LabelMaker


class Cells(nn.Module):
    """A GRU's cell over time, with functions around it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.weight = nn.GRUCell(32, 32), nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[1], 32)
        for now in x:
            state = self.cell(torch.tanh(now @ self.weight), state)
        return F.layer_norm(state, (32,)).square().mean()


class Attention(nn.Module):
    """Layers of attention with dropout, which a CPU computes by a dozen ops in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = (part.view(*x.shape[:2], 4, 8).transpose(1, 2) for part in layer(x).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
            x = x + mixed.transpose(1, 2).reshape(x.shape)
        return x.square().mean()


def traced(model: nn.Module, x: Tensor) -> Trace:
    return capture(StepSpec(model=model, batch=(x,), objective=Objective(loss=lambda output, batch: output)))


def calls_of(trace: Trace) -> list[list[str]]:
    """The forward's ops by the call that ran them."""
    found: list[list[str]] = []
    for op in trace.ops[: trace.num_forward_ops]:
        if op.begins_call:
            found.append([])
        found[-1].append(trace.signatures[op.signature].name.split(".")[1])
    return found


def test_the_ops_of_a_cell_are_one_call_and_functions_are_calls_of_their_own() -> None:
    calls = calls_of(traced(Cells(), torch.randn(3, 4, 32)))
    cells = [call for call in calls if "sigmoid_" in call]
    assert len(cells) == 3 and all(call.count("sigmoid_") == 2 and call.count("tanh_") == 1 for call in cells)
    assert [call for call in calls if "mm" in call] == [["mm"]] * 3 and ["tanh"] in calls
    assert any("native_layer_norm" in call and "sigmoid_" not in call for call in calls)


def test_folded_calls_have_the_calls_of_those_that_ran() -> None:
    calls = calls_of(traced(Cells(), torch.randn(40, 4, 32)))
    cells = [call for call in calls if "sigmoid_" in call]
    assert len(cells) == 40 and all(cell == cells[1] for cell in cells[1:])


def test_what_hooks_run_inside_of_a_call_belongs_to_it() -> None:
    """Under a plan the hooks detach what they keep: the cell is one call all the same."""
    model, x = Cells(), torch.randn(3, 4, 32)
    with apply_decisions(model, (Rebuild(path=""),)):
        calls = calls_of(traced(model, x))
    cells = [call for call in calls if "sigmoid_" in call]
    assert len(cells) == 3 and all(call.count("sigmoid_") == 2 and call.count("tanh_") == 1 for call in cells)


MADE: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "cells": (Cells, (24, 64, 32)),
    "attention": (Attention, (8, 64, 32)),
}


@pytest.mark.parametrize("name", MADE)
def test_a_plan_by_tensor_holds_nothing_that_no_program_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    kind, shape = MADE[name]
    model, x = kind(), torch.randn(shape)
    options = {"optimizer": None, "device": None, "actions": ("rebuild",), "cost": None}
    planner, _, _ = planner_for(model, (x,), objective=Objective(loss=lambda output, _: output), **options)
    strategy = planner.strategy(RebuildStrategy)
    assert strategy is not None
    way = strategy.ways[0]
    problem, ops = way.view.problem, planner.trace.ops
    calls = list(itertools.accumulate(op.begins_call for op in ops[: len(problem.ops)]))
    assert len({calls[place] for place in problem.places}) == len(problem.places)
    assert all(ops[place].begins_call for place in problem.places)
    labels = LabelMaker(problem)
    num = len(problem.places)
    held = {
        v
        for i in range(num)
        for j in range(i + 1, min(i + 4, num))
        for one in labels.labels(i, j)
        for v in one.held or ()
    }
    saved = {v for values in problem.saves for v in values}
    for value in held - saved:
        maker = way.view.maker[value]
        if not problem.ops[maker].can_rerun or value in problem.ops[maker].draws:
            continue  # a mask of zeros and ones
        assert any(value in op.inputs and calls[i] != calls[maker] for i, op in enumerate(problem.ops)), maker
    recorded: list[int] = []
    real = CallWatch._record
    monkeypatch.setattr(CallWatch, "_record", lambda *a: recorded.append(1) or real(*a))
    num_plans = 0
    for percent in range(35, 100, 8):
        choice = way.solver.solve(planner.plain.peak_bytes * percent // 100)
        if choice is None:
            continue
        with apply_decisions(model, (way.view.decide(choice),)) as applied:
            for _ in range(6):
                recorded.clear()
                model(x).backward()
            num_plans += applied.log.num_rederived > 0
            assert not recorded, f"at {percent} % a step was recorded, not followed"
    assert num_plans > 3


class OwnLoss(nn.Module):
    """Tensors' methods and operators, and a cross entropy of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(16, 64), nn.Linear(64, 512)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = hidden * torch.sigmoid(1.5 * hidden) + hidden.pow(2).rsqrt().mul(0.5)
        return F.cross_entropy(self.head(hidden), labels)


def test_calls_are_the_same_where_a_mode_waits_for_the_loss() -> None:
    """A mode makes every call from one place of its own code."""
    model, batch = OwnLoss(), (torch.randn(256, 16), torch.randint(0, 512, (256,)))
    spec = StepSpec(model=model, batch=batch, objective=Objective(loss=lambda output, _: output))
    plain = calls_of(capture(spec))
    with apply_decisions(model, (LossInPlace(path="", rows=32),)):
        waiting = calls_of(capture(spec))
    with torch.device("cpu"):  # a mode of torch's
        under_device = calls_of(capture(spec))
    *before, loss = plain
    assert len(before) == 9 and loss == ["_log_softmax", "nll_loss_forward"]
    assert waiting[: len(before)] == before and under_device == plain
