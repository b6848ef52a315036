"""Folded captures: the trace of a loop is the same, op by op, as when every call of it is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from recoup.capture.capture import capture
from recoup.capture.folding import FoldingMemory
from recoup.capture.op_cache import FakeResults
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.cost.devices import get_device
from recoup.cost.roofline import RooflineCost
from recoup.ir.decision import Decision, Loop, Rederive
from recoup.ir.trace import Trace
from recoup.planner.driver import Planner
from recoup.runtime.apply import apply_decisions
from tests.capture.unrolled import IRREGULAR, REGULAR
from tests.thorough import cases

_STEPS = 40
_BATCH = 64  # rows of 16 numbers: enough bytes for a tensor to be worth rederiving
_QUICK = ("lstm", "neuron", "readout", "same input", "mask")
_PLANNED = ("gru, stacked", "neuron", "average", "two loops", "loop in a loop", "checkpointed")
_REDERIVED = ("gru, stacked", "neuron", "same input", "mask", "average")
_MORE_IRREGULAR = ("a context used twice", "doubled once", "second half")  # by what others are irregular too


def _spec(model: nn.Module, *, steps: int = _STEPS, folds: bool = True) -> StepSpec:
    torch.manual_seed(0)
    return StepSpec(
        model=model,
        batch=(torch.randn(steps, _BATCH, 8),),
        objective=Objective(loss=lambda output, batch: output.float().pow(2).mean()),
        optimizer=torch.optim.Adam,
        folding=FoldingMemory() if folds else None,
    )


def _equal(one: Trace, other: Trace) -> None:
    """Asserts equality field by field, so that a failure says where."""
    for name in ("ops", "storages", "calls", "signatures"):
        for i, (a, b) in enumerate(zip(getattr(one, name), getattr(other, name), strict=False)):
            assert a == b, (name, i)
    assert one == other


def _planned(spec: StepSpec, decisions: Sequence[Decision], known: Trace) -> Trace:
    with apply_decisions(spec.model, decisions):
        return capture(spec, known=known)


def _paths(name: str) -> str:
    return "cell.0" if name == "two loops" else "cell"


def _check(name: str, plans: Sequence[Sequence[Decision]] = ()) -> None:
    model = REGULAR[name]()
    plain, folded = _spec(model, folds=False), _spec(model)
    trace = capture(plain)
    _equal(capture(folded), trace)
    assert folded.folding is not None
    assert folded.folding.num_calls[_paths(name)] == _STEPS
    for decisions in plans:
        folded.folding.reasons.clear()
        _equal(_planned(folded, decisions, trace), _planned(plain, decisions, trace))
        assert not folded.folding.reasons or isinstance(decisions[0], Rederive)  # chains of rebuilt tensors may be long


@pytest.mark.parametrize("name", _QUICK)
@pytest.mark.slow
def test_the_trace_is_the_same(name: str) -> None:
    _check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(REGULAR, _PLANNED))
def test_plans_traces_are_the_same(name: str) -> None:
    mixed = (Loop(path=_paths(name), chunk=4, calls=27, inside="rederive"),)
    _check(name, [(Rederive(path=""),), mixed] if name in _REDERIVED else [mixed])


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(IRREGULAR, [n for n in IRREGULAR if n not in _MORE_IRREGULAR]))
def test_what_is_not_alike_is_captured_in_full(name: str) -> None:
    model = IRREGULAR[name]()
    folded = _spec(model, steps=40)
    _equal(capture(folded), capture(_spec(model, steps=40, folds=False)))
    assert folded.folding is not None
    assert "cell" in folded.folding.excluded


def _num_ops_run(spec: StepSpec, monkeypatch: pytest.MonkeyPatch, known: Trace | None = None) -> int:
    count = 0
    run = FakeResults.run

    def counting(self: FakeResults, func: Any, args: Any, kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return run(self, func, args, kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(FakeResults, "run", counting)
        capture(spec, known=known)
    return count


@pytest.mark.slow
def test_longer_loops_run_no_more_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    model = REGULAR["same input"]()  # nothing is done between its calls
    specs = [_spec(model, steps=steps) for steps in (80, 160)]
    once, twice = (_num_ops_run(spec, monkeypatch) for spec in specs)
    assert once == twice
    assert _num_ops_run(_spec(model, folds=False), monkeypatch) > 2 * once
    traces = [capture(spec) for spec in specs]
    assert len(traces[1].ops) > 1.9 * len(traces[0].ops)
    with apply_decisions(model, (Loop(path="cell", chunk=4),)):
        once, twice = (_num_ops_run(s, monkeypatch, t) for s, t in zip(specs, traces, strict=True))
    assert once == twice


@pytest.mark.slow
def test_the_number_of_steps_may_change() -> None:
    model = REGULAR["gru"]()
    memory = FoldingMemory()
    for steps in (48, 30):
        spec = _spec(model, steps=steps)
        again = StepSpec(
            model=model, batch=spec.batch, objective=spec.objective, optimizer=spec.optimizer, folding=memory
        )
        _equal(capture(again), capture(_spec(model, steps=steps, folds=False)))


@pytest.mark.slow
def test_the_model_is_left_as_it_was() -> None:
    for name in ("neuron", "gru", "mask"):
        model = REGULAR[name]()
        before = {path: dict(module.__dict__) for path, module in model.named_modules()}
        capture(_spec(model))
        assert {path: dict(module.__dict__) for path, module in model.named_modules()} == before


@pytest.mark.slow
def test_plans_are_the_same() -> None:
    found = []
    for folds in (True, False):
        torch.manual_seed(0)
        model = REGULAR["neuron"]()
        cost = RooflineCost(get_device("cpu-generic"))
        planner = Planner(_spec(model, steps=64, folds=folds), cost=cost, actions=("rederive", "recompute"))
        found.append((planner.plain, planner.fit(planner.plain.peak_bytes * 6 // 10), planner.simulated))
    assert found[0] == found[1]


class _Tokens(nn.Module):
    """Reads token numbers, which are real tensors under fake ones; `looks`: and branches on one."""

    def __init__(self, *, looks: bool) -> None:
        super().__init__()
        self.table, self.step = nn.Embedding(50, 8), nn.GRUCell(8, 16)
        self.looks = looks

    def forward(self, tokens: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        h = self.step(self.table(tokens), h)
        return torch.tanh(h) if self.looks and int(tokens[0]) == 7 else h


class _Reader(nn.Module):
    def __init__(self, *, looks: bool) -> None:
        super().__init__()
        self.cell = _Tokens(looks=looks)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.cell.table.weight.new_zeros(tokens.shape[1], 16)
        for row in tokens:
            h = self.cell(row, h)
        return h


@pytest.mark.parametrize("looks", [False, True])
def test_values_count_only_if_the_model_looks_at_them(looks: bool) -> None:
    tokens = torch.randint(8, 50, (48, 4))
    tokens[30, 0] = 7
    traces = []
    memory = FoldingMemory()
    for folding in (memory, None):
        spec = StepSpec(
            model=_Reader(looks=looks),
            batch=(tokens,),
            objective=Objective(loss=lambda output, batch: output.mean()),
            folding=folding,
        )
        traces.append(capture(spec))
    _equal(*traces)
    assert ("cell" in memory.num_calls) is not looks
