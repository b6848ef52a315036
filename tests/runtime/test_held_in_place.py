"""Results of ops in place under a plan by tensor: those it holds are there, and a segment's ops run again once."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import recoup
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.cost.model import FlopsCost
from recoup.evidence.memory import measure_peak
from recoup.ir.decision import OpMark, Rebuild
from recoup.planner.driver import Planner
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild.known_calls import Calls
from recoup.runtime.rebuild.step_run import StepRun

WIDTH = 160


class Cells(nn.Module):
    """A GRU cell over six steps; on a CPU it writes its gates in place, over one chunk of a storage after another."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[1], WIDTH)
        for now in x:
            state = self.cell(now, state)
        return state


def product_flops(model: nn.Module, x: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    return int(counter.get_total_flops())


def peak(model: nn.Module, x: torch.Tensor) -> int:
    model.zero_grad(set_to_none=True)
    return measure_peak(lambda: model(x).sum().backward(), device=torch.device("cpu"), held_bytes=0)


def test_a_held_result_of_an_op_in_place_is_there_in_backward() -> None:
    torch.manual_seed(0)
    act, x = nn.ReLU(inplace=True), torch.randn(64, WIDTH)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), act)))
    marks = [OpMark(path="1", call=i, ordinal=0, op="aten.relu_.default", holds=True) for i in range(4)]
    plain = product_flops(model, x)
    with apply_decisions(model, (Rebuild(path="", marks=tuple(marks)),)):
        assert product_flops(model, x) == plain


def test_what_is_written_in_parts_is_rebuilt_with_its_segment() -> None:
    torch.manual_seed(0)
    model, x = Cells(), torch.randn(6, 64, WIDTH)
    with FlopCounterMode(display=False) as counter:
        model(x)
    plain = product_flops(model, x)
    with apply_decisions(model, (Rebuild(path=""),)):
        assert product_flops(model, x) - plain <= counter.get_total_flops()


def test_what_is_written_in_parts_is_rebuilt_in_one_storage() -> None:
    torch.manual_seed(0)
    model, x = Cells(), torch.randn(6, 64, WIDTH)
    peaks = []
    for plan in ((), (Rebuild(path=""),)):
        with apply_decisions(model, plan):
            peaks.append(peak(model, x))
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(x).sum().backward()
    assert all(g is not None and torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))
    assert peaks[1] <= peaks[0]


def test_what_was_copied_before_it_is_written_over_is_there_once() -> None:
    torch.manual_seed(0)
    x, peaks = torch.randn(512, WIDTH), []
    for inplace in (False, True):
        model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace))))
        marks = tuple(OpMark(path=str(2 * i), call=0, ordinal=0, op="aten.addmm.default", holds=True) for i in range(6))
        with apply_decisions(model, (Rebuild(path="", marks=marks),)):
            for _ in range(4):  # recorded, then by a program
                peaks.append(peak(model, x))
    assert max(peaks) == peaks[0]


class InPlaceResidual(nn.Module):
    """What is added to in place, with layers in the model's own code: no step has a program."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for layer in self.layers:
            x += torch.sigmoid(F.silu(layer(torch.tanh(x))))
        return x


@pytest.mark.parametrize("percent", [35, 40, 45])
def test_copies_of_what_is_written_over_are_no_ops_of_the_step(percent: int) -> None:
    torch.manual_seed(0)
    model, x = InPlaceResidual(), torch.randn(2048, WIDTH)
    options = {"loss": lambda out, _: out.sum(), "cost": FlopsCost(), "actions": ("rebuild",)}
    plan = recoup.plan(model, (x,), budget=f"{percent}%", **options)
    held_bytes = sum(p.nbytes for p in model.parameters()) + x.nbytes
    with apply_decisions(model, plan.decisions):
        with FlopCounterMode(display=False):  # op by op, and so it is told which ops there are
            model(x).sum().backward()
        peaks = set()
        for _ in range(3):  # by the forms of its calls
            model.zero_grad(set_to_none=True)
            run = lambda: model(x).sum().backward()  # noqa: E731
            peaks.add(measure_peak(run, device=torch.device("cpu"), held_bytes=held_bytes))
    assert peaks == {plan.predicted.peak_bytes}


@pytest.mark.parametrize("percent", [90, 75])
def test_the_plan_knows_which_version_of_a_storage_is_saved(percent: int) -> None:
    torch.manual_seed(0)
    spec = StepSpec(model=Cells(), batch=torch.randn(6, 64, WIDTH), objective=Objective(loss=lambda out, _: out.sum()))
    planner = Planner(spec, cost=FlopsCost(), actions=("rebuild",))
    found = planner.fit(planner.plain.peak_bytes * percent // 100)
    assert found is not None
    forward = sum(planner.trace.signatures[o.signature].flops for o in planner.trace.ops if o.phase == "forward")
    assert 0 < found.recomputed_flops <= forward


class TwoKinds(nn.Module):
    """Cells of two kinds, whose gates are read after them and whose inputs are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, memory = torch.zeros(x.shape[1], WIDTH), torch.zeros(x.shape[1], WIDTH)
        for now in x:
            state = self.gru(now, state) + memory
            state, memory = self.lstm(state.sigmoid(), (state, memory))
        return state * memory


def followed_to_the_end(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns a list to which every step adds whether it followed a program to its end."""
    ended: list[bool] = []
    real = Calls.end

    def end(self: Calls, key: object, followed: StepRun | None) -> None:
        ended.append(isinstance(followed, StepRun) and followed.is_done)
        real(self, key, followed)

    monkeypatch.setattr(Calls, "end", end)
    return ended


HELD = [("aten.addmm.default", 0), ("aten.sigmoid_.default", 5), ("aten.sigmoid_.default", 7), ("aten.add_.Tensor", 15)]


def held_marks(path: str, op: str, ordinal: int) -> tuple[OpMark, ...]:
    """Returns marks of a cell's first, third and fifth call: the next op begins a segment after the held one."""
    return tuple(
        OpMark(path=path, call=call, ordinal=ordinal, op=op, holds=True, begins_segment=True) for call in (0, 2, 4)
    )


@pytest.mark.parametrize(("op", "ordinal"), HELD)
@pytest.mark.parametrize(("model_class", "path"), [(Cells, "cell"), (TwoKinds, "gru")])
def test_cells_that_write_their_gates_have_programs(
    model_class: type[nn.Module], path: str, op: str, ordinal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = followed_to_the_end(monkeypatch)
    torch.manual_seed(0)
    model, x = model_class(), torch.randn(6, 64, WIDTH)
    plain, peaks = gradients(model, x), [peak(model, x)]
    with apply_decisions(model, (Rebuild(path="", marks=held_marks(path, op, ordinal)),)):
        for _ in range(8):
            found = gradients(model, x)
            assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
        peaks.append(peak(model, x))
    assert peaks[1] < peaks[0]
    # What is written over before anybody outside of the call has seen it can be held by the record alone.
    assert all(ended[-2:]) is (op != "aten.addmm.default"), "no step followed a program"


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


class Recurrent(nn.Module):
    """An LSTM cell over six steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = memory = torch.zeros(x.shape[1], WIDTH)
        for now in x:
            state, memory = self.cell(now, (state, memory))
        return state


@pytest.mark.parametrize("model_class", [Cells, Recurrent])
def test_gates_stay_in_one_storage_while_what_is_cheap_is_rebuilt(
    model_class: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd keeps the gates of a cell as parts of one storage: held, they take its bytes once, and no copy."""
    torch.manual_seed(0)
    model, x = model_class(), torch.randn(6, 64, WIDTH)
    plain, peaks = gradients(model, x), [peak(model, x)]
    spec = StepSpec(model=model, batch=x, objective=Objective(loss=lambda out, _: out.sum()))
    planner = Planner(spec, cost=FlopsCost(), actions=("rebuild",))
    state_bytes = 64 * WIDTH * 4
    found = planner.fit(planner.plain.peak_bytes - 5 * state_bytes)
    assert found is not None
    assert found.product_flops == planner.plain.product_flops
    ended = followed_to_the_end(monkeypatch)
    with apply_decisions(model, found.decisions):
        for _ in range(5):  # recorded, then by a program
            peaks.append(peak(model, x))
            assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model, x), strict=True))
    assert max(peaks[1:]) <= peaks[0] - 4 * state_bytes
    assert all(ended[-2:]), "no step followed a program"


class Written(nn.Module):
    """Elementwise ops in a row, of whose results autograd saves the first and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        y = (0.5 + h * 2.0).neg().add(1.0).exp()
        return (y * h.cos()).sum(1)


def test_an_intermediate_is_written_over_by_its_last_reader() -> None:
    torch.manual_seed(0)
    model, x = Written(), torch.randn(64, WIDTH)
    model(x).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    marks = (OpMark(path="linear", call=0, ordinal=0, op="aten.addmm.default", holds=True),)
    with apply_decisions(model, (Rebuild(path="", marks=marks),)):
        for turn in range(6):  # recorded, then by a program
            model.zero_grad(set_to_none=True)
            loss = model(x).sum()
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                loss.backward()
            assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))
            counts = collections.Counter(event.name for event in profiler.events())
            # Of `tanh`, `2 * h`, `+ 0.5`, `neg`, `+ 1` and `exp` the first two make tensors; one `add_` adds gradients.
            # In the first steps the profiler counts twice what `OpFunction` looks at.
            assert turn < 3 or [counts[f"aten::{name}_"] for name in ("mul", "add", "neg", "exp")] == [0, 3, 1, 1]
