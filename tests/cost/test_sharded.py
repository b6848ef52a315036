"""Sharded bytes: what one rank of a world holds, against the whole step's."""

from __future__ import annotations

import pytest
import torch

import recoup
from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.cli.options import check_request
from recoup.cost.model import FlopsCost
from recoup.cost.sharding import ShardedCost, num_all_gathers
from recoup.errors import UsageError
from tests.models import make


def _bytes(trace: object, category: str) -> int:
    return sum(s.nbytes for s in trace.storages if s.category == category)  # type: ignore[attr-defined]


@pytest.mark.parametrize("world_size", [1, 4, 8])
def test_a_rank_holds_its_part(world_size: int) -> None:
    model, batch, _ = make("llama")
    trace = capture(StepSpec(model=model, batch=batch, optimizer=torch.optim.AdamW))
    sharded = ShardedCost(FlopsCost(), world_size=world_size).price(trace).trace
    for category in ("parameter", "gradient", "optimizer"):
        whole = _bytes(trace, category)
        count = sum(s.category == category for s in trace.storages)
        assert 0 <= _bytes(sharded, category) * world_size - whole < count * world_size
    assert _bytes(sharded, "saved") == _bytes(trace, "saved")
    assert [op.signature for op in sharded.ops] == [op.signature for op in trace.ops]


def test_units_are_gathered_while_they_run() -> None:
    model, batch, _ = make("llama")
    trace = capture(StepSpec(model=model, batch=batch))
    priced = ShardedCost(FlopsCost(), world_size=4).price(trace)
    layer = sum(p.numel() * 4 for p in model.model.layers[0].parameters())  # type: ignore[union-attr, index, operator]
    root = sum(p.numel() * 4 for p in model.parameters()) - 3 * layer
    first = next(i for i, op in enumerate(trace.ops) if op.call >= 0 and "layers.1" in trace.calls[op.call].path)
    assert priced.op_workspace_bytes[first] == root + 2 * layer


@pytest.mark.slow
def test_a_plan_counts_the_optimizer_once() -> None:
    model, batch, _ = make("llama")
    cost = ShardedCost(FlopsCost(), world_size=4)
    plan = recoup.plan(model, batch, budget="80%", optimizer=torch.optim.AdamW, cost=cost)
    whole = recoup.plan(model, batch, budget="1GiB", optimizer=torch.optim.AdamW, cost=FlopsCost())
    assert plan.decisions
    assert plan.predicted.plain_peak_bytes < whole.predicted.plain_peak_bytes
    assert plan.predicted.peak_bytes <= plan.budget_bytes


def test_all_gathers() -> None:
    assert num_all_gathers(4) == 7
    assert num_all_gathers(4, reshard_after_forward=False) == 4


def test_refusals() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        ShardedCost(FlopsCost(), world_size=0)
    with pytest.raises(UsageError, match="--fsdp needs the name of a device"):
        check_request("hf:llama", fsdp=8)
