from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.cost.cache import capacity_path
from recoup.cost.cache_capacity import cache_capacity_bytes
from recoup.cost.measured import MeasuredCost
from recoup.cost.reuse import cold_shares, may_be_warm
from recoup.ir.trace import Trace

CACHE_BYTES = 1 << 20


def chain(rows: int) -> Trace:
    """The step of eight elementwise modules on (rows, 64) numbers."""
    model = nn.Sequential(nn.Linear(64, 64), *(nn.Tanh() for _ in range(8)))
    objective = Objective(loss=lambda output, batch: output.sum())
    return capture(StepSpec(model=model, batch=torch.randn(rows, 64), objective=objective))


def of(trace: Trace, shares: list[float], name: str) -> list[float]:
    return [s for op, s in zip(trace.ops, shares, strict=True) if name in trace.signatures[op.signature].name]


def test_what_fits_the_cache_is_warm_where_it_was_just_made_and_cold_after_a_cache_full() -> None:
    small, large = chain(64), chain(1 << 14)
    assert of(small, cold_shares(small, CACHE_BYTES), "tanh.") == [0.0] * 8
    assert of(large, cold_shares(large, CACHE_BYTES), "tanh.") == [1.0] * 8
    # Results of 64 KiB, one read and one written by each op: the first was made 16 ops before backward reads it.
    middle = chain(256)
    assert of(middle, cold_shares(middle, CACHE_BYTES), "tanh.") == [0.0] * 8
    backward = of(middle, cold_shares(middle, CACHE_BYTES), "tanh_backward")
    assert backward[0] == 0.0, "the last result was just made"
    assert backward[-1] == pytest.approx(0.5), "the first has left, its gradient was just made"


def test_the_first_reader_of_anything_is_cold_and_so_is_who_reads_nothing() -> None:
    trace = chain(64)
    shares = cold_shares(trace, CACHE_BYTES)
    assert shares[next(i for i, op in enumerate(trace.ops) if op.inputs)] == 1.0
    alone = dataclasses.replace(trace, ops=tuple(dataclasses.replace(op, inputs=()) for op in trace.ops))
    assert set(cold_shares(alone, CACHE_BYTES)) == {1.0}


def test_an_op_is_priced_between_its_warm_and_its_cold_time() -> None:
    trace = chain(256)
    cost = MeasuredCost(torch.device("cpu"))
    capacity_bytes = cache_capacity_bytes(capacity_path(cost.name))
    priced, shares = cost.price(trace), cold_shares(trace, capacity_bytes)
    seen = set()
    for op, seconds, share in zip(trace.ops, priced.op_seconds, shares, strict=True):
        found = cost.measurement(trace.signatures[op.signature])
        if found is not None:
            seen.add(share)
            assert found.warm_seconds <= found.seconds
            assert seconds == pytest.approx(found.warm_seconds + share * (found.seconds - found.warm_seconds))
    assert len(seen) > 1


def test_only_what_fits_may_be_warm() -> None:
    def product(trace: Trace) -> bool:
        (found,) = {s for s in trace.signatures if s.name == "aten.addmm.default"}
        return may_be_warm(found, CACHE_BYTES)

    assert product(chain(64)) and not product(chain(1 << 16)), "bias and weight are a hundredth of what is read"
