"""Host time of a plan: by calls and ops that run again, on a CPU."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.cost.host_costs import COLD, TYPICAL, HostCosts, load_host_costs, store_host_costs
from recoup.cost.host_overhead import host_seconds, noticed_ops, num_packed_beside, step_seconds
from recoup.cost.measured import MeasuredCost
from recoup.cost.model import price_by_signature
from recoup.ir.decision import Decision, Loop, LossInPlace, OpMark, Rebuild, Recompute, Rederive, Save
from recoup.ir.trace import Trace
from recoup.planner import host_calibration
from recoup.planner.host_calibration import host_costs
from recoup.runtime.apply import apply_decisions


def test_host_time_grows_with_what_runs_again() -> None:
    block = lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())  # noqa: E731
    model = nn.Sequential(*(block() for _ in range(4)))
    spec = StepSpec(model=model, batch=torch.randn(4, 8), objective=Objective(loss=lambda output, batch: output.sum()))
    plain = capture(spec)

    def seconds(*decisions: Decision) -> float:
        with apply_decisions(model, decisions):
            return sum(host_seconds(decisions, capture(spec, known=plain), plain=plain, costs=TYPICAL))

    one = Recompute(path="1")
    span = dataclasses.replace(one, span=("2",))
    assert host_seconds((), plain, plain=plain, costs=TYPICAL) == (0.0, 0.0)
    # Its Linear and LayerNorm run again; what GELU saves is there before GELU runs.
    assert seconds(one) > TYPICAL.region_seconds + 3 * TYPICAL.call_seconds
    assert seconds(span) == pytest.approx(2 * seconds(one), rel=0.2)
    kept = seconds(dataclasses.replace(one, keep=("matmul:8x8",))) - seconds(one)
    assert kept == pytest.approx(3 * TYPICAL.watched_op_seconds, rel=0.3)


def test_on_a_gpu_the_slower_of_host_and_device_counts_in_each_phase() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    spec = StepSpec(model=model, batch=torch.randn(4, 8), objective=Objective(loss=lambda output, batch: output.sum()))
    plain = dataclasses.replace(capture(spec), device="cuda")

    def seconds(op_seconds: float, *decisions: Decision) -> float:
        priced = price_by_signature(plain, lambda s: (op_seconds, 0), source="", is_estimate=True)
        return step_seconds(decisions, priced, plain=plain)

    num_ops = len(plain.ops)
    everywhere = Rederive(path="")
    assert seconds(1e-3) == pytest.approx(num_ops * 1e-3) == seconds(1e-3, everywhere)  # it hides behind the kernels
    assert seconds(1e-9) < 1e-5 * num_ops  # the host is slower: what it does on top counts
    without = seconds(1e-9)
    plain = dataclasses.replace(plain, num_rederived=3)
    each = TYPICAL.packed_tensor_seconds + TYPICAL.single_tensor_seconds
    assert seconds(1e-9, everywhere) - without == pytest.approx(3 * each)


def test_a_plan_is_charged_for_the_ops_that_it_records() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    spec = StepSpec(model=model, batch=torch.randn(4, 8), objective=Objective(loss=lambda output, batch: output.sum()))
    plain = capture(spec)
    forward = plain.ops[: plain.num_forward_ops]
    num_ops = sum(not plain.signatures[o.signature].is_view for o in forward)

    def seconds(*decisions: Decision) -> float:
        return host_seconds(decisions, plain, plain=plain, costs=TYPICAL)[0]

    region = Recompute(path="1")
    assert seconds(region) == 0.0
    assert seconds(Save(path=""), region) == pytest.approx(num_ops * TYPICAL.recorded_op_seconds)  # its inputs' history
    assert seconds(Rederive(path="0"), region) == pytest.approx(num_ops * TYPICAL.recorded_op_seconds)
    assert seconds(Rederive(path="0")) == 0.0  # a program: only what it rebuilds counts
    plain = dataclasses.replace(plain, num_rederived=3)
    assert seconds(Rederive(path="0")) == pytest.approx(3 * TYPICAL.packed_tensor_seconds)


class Cells(nn.Module):
    """A GRU cell over steps of time, each a call of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[1], 64)
        for now in x:
            state = self.cell(now, state)
        return state


def cells_traced(model: nn.Module) -> Trace:
    objective = Objective(loss=lambda output, batch: output.sum())
    return capture(StepSpec(model=model, batch=torch.randn(6, 64, 64), objective=objective))


def test_tensors_that_stay_saved_beside_rebuilt_ones_are_packed_too() -> None:
    """The hooks are on for a call as a whole: what else it saves goes through them as well."""
    model = Cells()
    plain = cells_traced(model)
    assert num_packed_beside(plain) == (0, 0)
    others = (("aten.sigmoid_.default", 5), ("aten.sigmoid_.default", 7))
    held = (("aten.clone.default", 8), ("aten.mul_.Tensor", 9), ("aten.tanh_.default", 11), ("aten.add_.Tensor", 15))
    marks = [
        OpMark(path="cell", call=call, op=op, ordinal=ordinal, holds=at in held, stays=at in others)
        for call in range(6)
        for at in (*held, *others)
        for op, ordinal in (at,)
    ]
    decisions = (Rebuild(path="", marks=tuple(marks)),)
    with apply_decisions(model, decisions):
        under = cells_traced(model)
    assert under.num_rederived == 7  # `h - n` of each step, and the zeros that it starts with
    num_kept, num_rebuilt = num_packed_beside(under)
    assert num_kept >= 4 * 6
    assert num_rebuilt == 1  # the zeros: the first call saves them beside its `h - n`
    costs = HostCosts(beside_tensor_seconds=1.0)
    assert sum(host_seconds(decisions, under, plain=plain, costs=costs)) == num_kept + num_rebuilt


def test_a_replay_is_charged_for_what_code_sees_of_a_call_and_by_the_chunk() -> None:
    plain = cells_traced(Cells())
    noticed = noticed_ops(plain)
    forward = [i for i in range(plain.num_forward_ops) if not plain.signatures[plain.ops[i].signature].is_view]
    assert sum(noticed[i] for i in forward) < 0.7 * len(forward)
    saving = {op for storage in plain.storages for op in storage.saved_ops}
    assert all(noticed[i] for i in forward if i in saving)
    seconds = [
        sum(host_seconds((Loop(path="cell", chunk=chunk),), plain, plain=plain, costs=HostCosts(region_seconds=1.0)))
        for chunk in (1, 3)
    ]
    assert seconds == [pytest.approx(6.0), pytest.approx(2.0)]


def test_calls_that_a_patched_module_lets_pass_are_charged_for() -> None:
    plain = cells_traced(Cells())
    costs = HostCosts(passed_call_seconds=1.0)

    def seconds(*decisions: Decision) -> tuple[float, float]:
        return host_seconds(decisions, plain, plain=plain, costs=costs)

    assert seconds(Recompute(path="cell", call=2)) == (5.0, 0.0)
    assert seconds(Recompute(path=""), Recompute(path="cell", call=2)) == (5.0, 5.0)
    assert seconds(Recompute(path="cell")) == (0.0, 0.0)
    assert seconds(Loop(path="cell", chunk=2)) == (0.0, 0.0)


def test_waiting_for_a_loss_is_charged_for_where_no_program_watches_the_calls_anyway() -> None:
    plain = cells_traced(Cells())
    costs = HostCosts(loss_call_seconds=1.0)
    num_calls = sum(op.begins_call for op in plain.ops[: plain.num_forward_ops])
    loss = LossInPlace(path="", rows=8)
    assert num_calls > 6
    assert host_seconds((loss,), plain, plain=plain, costs=costs) == (num_calls, 0.0)
    assert host_seconds((Recompute(path="cell"), loss), plain, plain=plain, costs=costs)[0] == num_calls
    assert host_seconds((Rederive(path=""), loss), plain, plain=plain, costs=costs)[0] == 0
    assert host_seconds((loss, Rebuild(path="")), plain, plain=plain, costs=costs)[0] == 0


def test_steps_of_a_scan_that_run_again_cost_their_ops_alone() -> None:
    spec = StepSpec(
        model=nn.Linear(8, 8), batch=torch.randn(4, 8), objective=Objective(loss=lambda output, batch: output.sum())
    )
    plain = capture(spec)
    views = [s.is_view for s in plain.signatures]
    again = dataclasses.replace(plain, ops=tuple(dataclasses.replace(o, replayed=True) for o in plain.ops))
    num_again = sum(not views[o.signature] for o in plain.ops)
    assert sum(host_seconds((), again, plain=plain, costs=TYPICAL)) == pytest.approx(
        num_again * TYPICAL.replayed_op_seconds
    )
    rebuilding = dataclasses.replace(plain, num_rederived=5)  # with its segment a tensor is rebuilt for less
    of_one = {Rebuild(path=""): TYPICAL.followed_tensor_seconds, Rederive(path=""): TYPICAL.single_tensor_seconds}
    for decision, of_tensor in of_one.items():
        found = host_seconds((decision,), rebuilding, plain=plain, costs=TYPICAL)[1]
        assert found == pytest.approx(5 * of_tensor)
        found = host_seconds((decision,), again, plain=plain, costs=TYPICAL)[1]
        assert found == pytest.approx(num_again * TYPICAL.rerun_op_seconds)
    scanned = host_seconds((), again, plain=plain, costs=TYPICAL, num_scan_replayed=num_again, num_scan_tapes=3)
    assert sum(scanned) == pytest.approx(3 * TYPICAL.tape_seconds)


def test_costs_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECOUP_CACHE_DIR", str(tmp_path))
    seen: list[torch.Tensor] = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(output))
    random = torch.get_rng_state()
    try:
        measured = host_costs()
    finally:
        hook.remove()
    assert not seen and torch.equal(torch.get_rng_state(), random)
    for name in ("region_seconds", "replayed_op_seconds", "recorded_op_seconds", "forward_op_seconds", "tape_seconds"):
        assert 1e-7 < getattr(measured, name) < 1e-2, name
    assert all(seconds >= 0 for seconds in dataclasses.astuple(measured))
    (path,) = tmp_path.glob("host-*")
    assert len(load_host_costs(path)) == 1
    monkeypatch.setattr(host_calibration, "measure_host_costs", lambda: pytest.fail("measured again"))
    assert host_costs() == measured
    cost = MeasuredCost(torch.device("cpu"), host_costs=measured)
    small = cost.price(capture(StepSpec(model=nn.Linear(2, 2), batch=torch.ones(1, 2)))).host_costs
    assert small.packed_tensor_seconds == pytest.approx(measured.packed_tensor_seconds)
    large = cost.price(capture(StepSpec(model=nn.Linear(2, 2), batch=torch.ones(1 << 20, 2)))).host_costs
    for name in ("packed_tensor_seconds", "region_seconds", "replayed_op_seconds"):  # the memory's time, on any host
        added = getattr(COLD, name) - getattr(TYPICAL, name)
        assert getattr(large, name) - getattr(small, name) == pytest.approx(added, rel=0.2), name
    assert large.tape_seconds == measured.tape_seconds


def _times_typical(factor: float, **factors: float) -> HostCosts:
    shares = dict.fromkeys(dataclasses.asdict(TYPICAL), factor) | factors
    return HostCosts(**{name: share * getattr(TYPICAL, name) for name, share in shares.items()})


def test_a_broken_file_is_measured_anew_and_a_closed_directory_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_calibration, "measure_host_costs", lambda: _times_typical(2.0))
    monkeypatch.setenv("RECOUP_CACHE_DIR", str(tmp_path))
    assert host_costs().region_seconds == pytest.approx(2 * TYPICAL.region_seconds)
    (path,) = tmp_path.glob("host-*")
    whole = dataclasses.asdict(TYPICAL)
    others = {name: seconds for name, seconds in whole.items() if name != "tape_seconds"}
    for left in ("{", json.dumps(whole), json.dumps([others]), json.dumps([whole | {"tape_seconds": 0.0}]), "[]"):
        path.write_text(left)
        assert not load_host_costs(path) and host_costs().region_seconds == pytest.approx(2 * TYPICAL.region_seconds)
    monkeypatch.setenv("RECOUP_CACHE_DIR", str(path / "below"))
    assert host_costs() == TYPICAL


def test_one_disturbed_process_does_not_decide_what_a_host_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECOUP_CACHE_DIR", str(tmp_path))
    followed: list[float] = []
    for share in (3.0, 0.49, 0.55, 0.45, 0.49, 7.0):  # the first beside another job; of the last nobody asks
        measured = _times_typical(0.5, followed_tensor_seconds=share)
        monkeypatch.setattr(host_calibration, "measure_host_costs", lambda measured=measured: measured)
        for _ in range(2):  # the second time in the same process
            followed.append(host_costs().followed_tensor_seconds / TYPICAL.followed_tensor_seconds)
        for path in tmp_path.glob("host-*"):  # the next process starts later
            os.utime(path, (0.0, 0.0))
    assert followed[::2] == followed[1::2]
    assert followed[::2] == pytest.approx([8**0.5, 2.0, 0.5, 0.5, 0.5, 0.5], rel=1e-6)
    assert len(load_host_costs(path)) == 5


def test_what_another_process_wrote_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    first, second = _times_typical(1.0), _times_typical(2.0)
    assert store_host_costs(path, first) == (first,)
    assert store_host_costs(path, second) == (first,)  # both measured as the first
    assert store_host_costs(path, second, known=(first,)) == (first, second)
    assert store_host_costs(path, first, known=(first,)) == (first, second)
    assert [each.name for each in tmp_path.iterdir()] == ["host.json"]


def test_the_most_likely_costs_are_those_that_the_times_tell_and_never_zero() -> None:
    random = numpy.random.default_rng(0)
    names = [field.name for field in dataclasses.fields(HostCosts)]
    typical = numpy.asarray([getattr(TYPICAL, name) for name in names])
    rows = [[*map(float, random.integers(0, 50, len(names))), 1.0] for _ in range(len(names) + 7)]
    true = typical * random.choice([0.25, 0.5, 1.0, 2.0, 4.0], len(names))
    times = [float(numpy.dot(row, [*true, 1e-3])) for row in rows]
    found = host_calibration._most_likely(rows, times, [1e-4 * t for t in times])
    assert numpy.allclose(found, true, rtol=0.1), found / true
    one_off = [10 * times[0], *times[1:]]  # another process had the core
    found = host_calibration._most_likely(rows, one_off, [1e-4 * t for t in times])
    assert max(found / true) < 2 and min(found / true) > 0.5, found / true
    for nonsense in ([-t for t in times], [0.0] * len(times), [100 * t * random.random() for t in times]):
        shares = numpy.asarray(host_calibration._most_likely(rows, nonsense, [1e-3 * abs(t) for t in times])) / typical
        assert shares.min() > 0.02 and shares.max() < 20, shares
    fast = [float(numpy.dot(row, [*(typical / 3), 1e-3])) for row in rows[:3]]  # too few to tell one from another
    shares = numpy.asarray(host_calibration._most_likely(rows[:3], fast, [1e-3 * t for t in fast])) / typical
    assert shares.max() < 0.6 and shares.min() > 0.2, shares  # so all are as fast as those that are told


def test_costs_are_rounded_to_the_nearest_power() -> None:
    for share, rounded in ((0.24, 0.25), (0.58, 0.5), (0.61, 0.5**0.5), (0.83, 0.5**0.5), (0.85, 1.0), (2.5, 8**0.5)):
        found = host_calibration._rounded_median([_times_typical(share)])
        assert found.region_seconds == pytest.approx(rounded * TYPICAL.region_seconds), share
