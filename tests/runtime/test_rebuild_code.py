"""The code that rebuilds a segment's values: what it runs, where results go, and what it holds."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from recoup.ir.decision import Rebuild
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild.op_forms import TENSOR
from recoup.runtime.rebuild.op_function import OpFunction
from recoup.runtime.rebuild.rebuild_code import RebuildCode, Rerun
from recoup.runtime.rebuild.segment_program import SegmentProgram
from recoup.runtime.rebuild.values import Geometry, geometry_of
from recoup.thresholds import MOST_REMEMBERED_ANSWERS

X = torch.arange(6.0).reshape(2, 3)
LAID = geometry_of(X)
TURNED: Geometry = torch.Size([2, 3]), (1, 2), 0, torch.float32


def op(call: Any, *, rest: tuple[Any, ...] = (), first: bool = True, over: Any = None, **kwargs: Any) -> Any:
    """Returns the form of an op with one result."""
    run, run_over = OpFunction(call), OpFunction(over)
    return SimpleNamespace(op=run, over=run_over, rest=rest, first=first, kwargs=kwargs, is_single=True)


def code(*reruns: Rerun, wanted: set[int], bases: dict[int, Geometry], narrow: tuple[int, ...] = ()) -> RebuildCode:
    return RebuildCode(reruns, wanted, starts=(), bases=bases, narrow=narrow)


def run(rebuilding: RebuildCode, *starts: Tensor, compact: bool = False) -> dict[int, Tensor]:
    return rebuilding.run(lambda number: starts[number], {}, lambda number: compact)


def test_results_that_lie_otherwise_are_copied_into_place_in_every_run() -> None:
    one = Rerun(op(torch.mul, rest=(2.0,)), ((0, LAID),), ((0, 1),), (), -1)
    two = Rerun(op(torch.add, rest=(1.0,)), ((1, None),), ((0, 2),), (1,), -1)
    rebuilding = code(one, two, wanted={2}, bases={1: LAID, 2: TURNED})
    for _ in range(3):
        found = run(rebuilding, X)
        assert found.keys() == {2} and geometry_of(found[2]) == TURNED and torch.equal(found[2], X * 2 + 1)


def test_tensors_in_lists_stand_where_they_stood() -> None:
    joined = op(torch.cat, rest=([TENSOR, TENSOR],), first=False, dim=1)
    rerun = Rerun(joined, ((0, LAID), (1, LAID)), ((0, 2),), (0, 1), -1)
    rebuilding = code(rerun, wanted={2}, bases={2: geometry_of(torch.cat([X, X], dim=1))})
    for _ in range(2):
        assert torch.equal(run(rebuilding, X, X + 6)[2], torch.cat([X, X + 6], dim=1))


@pytest.mark.parametrize("compact", [True, False])
def test_a_source_is_written_over_only_where_it_was_made_anew(compact: bool) -> None:
    start = X.clone()
    over = Rerun(op(torch.neg, over=torch.neg_), ((0, LAID),), ((0, 1),), (0,), 0)
    rebuilding = code(over, wanted={1}, bases={1: LAID}, narrow=(0,))
    for _ in range(2):
        start.copy_(X)
        assert torch.equal(run(rebuilding, start, compact=compact)[1], -X)
        assert torch.equal(start, -X if compact else X)


def test_an_intermediate_goes_after_its_last_reader() -> None:
    alive: list[int] = []
    held: list[weakref.ref[Tensor]] = []

    def noted(x: Tensor) -> Tensor:
        alive.append(sum(ref() is not None for ref in held))
        out = x + 1
        held.append(weakref.ref(out))
        return out

    chain = [Rerun(op(noted), ((i, None if i else LAID),), ((0, i + 1),), (i,) if i else (), -1) for i in range(5)]
    rebuilding = code(*chain, wanted={5}, bases=dict.fromkeys(range(6), LAID))
    for _ in range(2):
        held.clear()
        assert torch.equal(run(rebuilding, X)[5], X + 5)
    assert max(alive) == 1


def test_values_of_a_chain_hold_what_those_before_hold_and_one_source_more() -> None:
    program = SegmentProgram(-1)
    program.sources = set(range(100))
    previous = 0
    for i in range(1, 100):
        program.ops.append((op(torch.add), (previous, i), ((0, 100 + i),)))  # type: ignore[arg-type]
        previous = 100 + i
    assert all(set(program.lead_of(100 + i)) == set(range(i + 1)) for i in range(1, 100))
    assert all(len(program.lead_of(100 + i).more) == 1 for i in range(1, 100))
    assert list(program.lead_of(7)) == [7] and list(program.lead_of(1000)) == []


def test_values_that_are_asked_for_in_ever_other_sets_leave_no_code_behind() -> None:
    program = SegmentProgram(-1)
    program.sources = {0}
    program.bases = dict.fromkeys(range(200), LAID)
    for i in range(1, 200):
        form = op(torch.add, rest=(1.0,))
        form.targets, form.geometries, form.part = (), (LAID,), LAID
        program.ops.append((form, (i - 1,), ((0, i),)))
    for i in range(1, 200):
        assert torch.equal(run(program.code(frozenset([i])), X)[i], X + i)
    assert len(program._codes) <= MOST_REMEMBERED_ANSWERS


def test_a_second_backward_runs_each_op_again_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
    x, counts = torch.randn(64, 64), []
    with apply_decisions(model, (Rebuild(path=""),)):
        for _ in range(4):  # recorded, then by a program
            loss = model(x).sum()
            for _ in range(2):
                with profile(activities=[ProfilerActivity.CPU]) as profiler:
                    loss.backward(retain_graph=True)
                counts.append(sum(event.name == "aten::addmm" for event in profiler.events()))
            del loss
    assert counts[3:] == [6] * 5
    assert max(counts) <= 8  # the profiler counts an op that `OpFunction` looks at twice, in each step's code once
