from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup import _torch
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.cost import cache, measured
from recoup.cost.measured import MeasuredCost
from recoup.planner.driver import Planner
from tests.cost.helpers import signature_of, trace_of

aten = torch.ops.aten
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RECOUP_CACHE_DIR", str(tmp_path / "cache"))


def some_ops() -> Any:
    x = torch.rand(256, 256)
    return trace_of([
        signature_of(aten.mm.default, x, x),
        signature_of(aten.native_dropout.default, x, 0.5, True),
        signature_of(aten.relu.default, torch.rand(8)),
        signature_of(aten.view.default, x, [-1]),
    ])  # fmt: skip


def test_prices_and_source() -> None:
    priced = MeasuredCost(CPU).price(some_ops())
    big, dropout, small, view = priced.op_seconds
    assert 0 < big < 1 and 0 < dropout < 1
    assert small == measured.SMALL_OP_SECONDS["cpu"] and view == 0
    assert priced.source.startswith("measured on cpu") and torch.__version__ in priced.source
    assert "roofline" not in priced.source
    assert not priced.is_estimate


def test_second_time_comes_from_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = some_ops()
    first = MeasuredCost(CPU).price(trace)
    monkeypatch.setattr(measured, "measure_ops", None)  # calling it would fail
    assert MeasuredCost(CPU).price(trace) == first
    (file,) = (tmp_path / "cache").glob("ops-*")
    head, *ops = (json.loads(line) for line in file.read_text().split("\n") if line)
    assert head["torch"] == torch.__version__ and len(ops) == 2


def test_cache_is_for_these_threads_and_this_torch() -> None:
    paths = {
        cache.cache_path(name, threads=threads, torch_version=version)
        for name in ("a", "b")
        for threads in (1, 2)
        for version in ("2.11", "2.13")
    }
    assert len(paths) == 8


@pytest.mark.parametrize("content", ["", "[]", '{"ops": 3}', '["a", [1]]', '["a", 3]', "\x00", "[1, 2"])
def test_a_broken_cache_is_no_cache(content: str, tmp_path: Path) -> None:
    path = tmp_path / "ops.jsonl"
    path.write_text(content)
    assert cache.load(path) == {}
    entry = cache.Measurement(
        seconds=1.5, warm_seconds=0.5, spread_seconds=0.25, workspace_bytes=7, extra_output_bytes=0
    )
    cache.store(path, {"a": entry}, device_name="d", torch_version="v")
    assert cache.load(path) == {"a": entry}


def test_an_unwritable_cache_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RECOUP_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert MeasuredCost(CPU).price(some_ops()).op_seconds[0] > 0


def test_stores_merge(tmp_path: Path) -> None:
    path = tmp_path / "ops.jsonl"
    entry = cache.Measurement(
        seconds=1.5, warm_seconds=0.5, spread_seconds=0.25, workspace_bytes=7, extra_output_bytes=0
    )
    cache.store(path, {"a": entry}, device_name="d", torch_version="v")
    cache.store(path, {"b": None}, device_name="d", torch_version="v")
    assert cache.load(path) == {"a": entry, "b": None}
    assert [p.name for p in tmp_path.iterdir()] == ["ops.jsonl"]


def test_ops_that_cannot_run_alone_are_scaled_from_the_roofline_and_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(256, 256)
    impossible = signature_of(aten.relu.default, x)
    object.__setattr__(impossible, "name", "aten.no_such_op.default")
    trace = trace_of([signature_of(aten.mm.default, x, x), impossible])
    priced = MeasuredCost(CPU).price(trace)
    assert priced.op_seconds[1] > 0
    assert "1 of 2 distinct ops scaled from a roofline" in priced.source
    monkeypatch.setattr(measured, "measure_ops", None)
    assert MeasuredCost(CPU).price(trace) == priced


def test_a_busy_machine_measures_what_an_idle_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for clock in ("perf_counter", "monotonic", "time"):  # only one in a thousand instants is ours
        whole = getattr(time, clock)
        monkeypatch.setattr(time, clock, lambda whole=whole: 1000 * whole())
    monkeypatch.setattr(measured, "MEASURING_SECONDS", 5.0)
    assert "scaled" not in MeasuredCost(CPU).price(some_ops()).source


def test_out_of_time_and_out_of_memory_leave_it_to_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = some_ops()
    with monkeypatch.context() as patch:
        patch.setattr(measured, "MEASURING_SECONDS", -1.0)
        assert "2 of 4 distinct ops scaled" in MeasuredCost(CPU).price(trace).source
    with monkeypatch.context() as patch:
        patch.setattr(measured, "available_bytes", lambda device: 1 << 16)
        assert "2 of 4 distinct ops scaled" in MeasuredCost(CPU).price(trace).source
    # Neither was held against the ops.
    assert "scaled" not in MeasuredCost(CPU).price(trace).source


def test_leaves_random_numbers_alone() -> None:
    trace = some_ops()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    MeasuredCost(CPU, cache=False).price(trace)
    assert torch.equal(torch.rand(3), expected)


def test_runs_the_recorded_ops_inside_autocast_and_fake_modes() -> None:
    trace = some_ops()
    with torch.autocast("cpu", dtype=torch.bfloat16), _torch.fake_tensor_mode():
        cost = MeasuredCost(CPU, cache=False)
        cost.price(trace)
    found = cost.measurement(trace.signatures[0])
    assert found is not None and found.workspace_bytes == 0 and found.spread_seconds >= 0


def test_what_ran_once_for_a_long_step_is_timed_for_one_of_which_it_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    x, wide = torch.rand(256, 256), torch.rand(1024, 1024)
    of_long, of_short = signature_of(aten.mm.default, wide, wide), signature_of(aten.relu.default, x)
    cost = MeasuredCost(CPU)
    cost.price(trace_of([*[of_long] * 40, of_short]))
    assert (found := cost.measurement(of_short)) is not None and found.is_rough
    assert (found := cost.measurement(of_long)) is not None and not found.is_rough
    with monkeypatch.context() as patch:
        patch.setattr(measured, "measure_ops", None)
        for same in (cost, MeasuredCost(CPU)):  # its parts, too, are no more exact than the step; and it is on disk
            same.price(trace_of([*[of_long] * 40, of_short]))
        cost.price(trace_of([of_short]))
    other = MeasuredCost(CPU)
    other.price(trace_of([of_short]))
    assert (found := other.measurement(of_short)) is not None and not found.is_rough


def test_a_search_gives_back_the_memory_that_ops_were_run_in() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    spec = StepSpec(model=model, batch=torch.randn(1024, 256), objective=Objective(loss=lambda out, batch: out.sum()))
    cost = MeasuredCost(CPU)
    planner = Planner(spec, cost=cost, actions=None)
    assert cost._arena is not None, "kept between the prices of a search: to touch it first takes longer than the ops"
    planner.fit(int(0.8 * planner.plain.peak_bytes))
    assert cost._arena is None


@pytest.mark.parametrize("nbytes", [256, 8 << 10, 16 << 10])
def test_small_losses_leave_a_scalar_in_a_storage_of_their_inputs_size(nbytes: int) -> None:
    """A list of losses kept up to 37 % more than the plan said."""
    model, x = nn.Linear(8, 16), torch.randn(nbytes // 64, 8)
    targets = torch.randn(40, nbytes // 64, 16)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        given, wanted = batch
        return torch.stack([nn.functional.mse_loss(model(given + i), y) for i, y in enumerate(wanted)]).mean()

    planned = recoup.plan(model, (x, targets), budget="100%", step=step, optimizer=torch.optim.SGD)
    evidence = recoup.verify(model, planned, (x, targets), step=step, optimizer=torch.optim.SGD, timed=False)
    assert evidence.peak_bytes == pytest.approx(planned.predicted.peak_bytes, rel=0.005)


def test_ops_are_run_in_a_part_of_the_memory_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "available_bytes", lambda device: 64 << 20)
    cost = MeasuredCost(CPU)
    cost.price(some_ops())
    arena = cost._arena
    assert arena is not None and arena.num_bytes + arena._flush.numel() <= 32 << 20
