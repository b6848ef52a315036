"""Plans for several shapes: each batch under its own, the worst planned first, larger ones weighed before they run."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import recoup
from recoup.errors import BatchTooLarge, ConflictError, InfeasibleBudget, ReplayError, UsageError
from recoup.evidence.memory import measure_peak, storage_bytes
from recoup.integrations.shapes import ShapePlan, apply_shapes, fit_shapes, shapes_of
from recoup.ir.decision import Recompute
from recoup.ir.plan import Plan
from recoup.runtime import execution_context
from recoup.runtime.apply import find_patches, plain
from tests.integrations.ranks import plan_of
from tests.models import Stack, plain_step, same, step


def _batch(rows: int) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))


def _bucket(model: Stack, rows: int, *paths: str, inside: Any = "save") -> ShapePlan:
    decisions = tuple(Recompute(path=p, inside=inside) for p in paths)
    plan = plan_of(model, decisions)
    values = {**plan.to_json()["predicted"], "plain_peak_bytes": rows}
    data = {**plan.to_json(), "predicted": values, "budget_bytes": 1 << 20}
    return ShapePlan(shapes=shapes_of(_batch(rows)), plan=Plan.from_json(data))


def _replays(model: Stack, rows: int) -> int:
    before = execution_context.counters()[0]
    assert same(step(model, _batch(rows)), plain_step(model, _batch(rows)))
    return execution_context.counters()[0] - before


def test_each_batch_runs_under_the_smallest_plan_that_covers_it() -> None:
    model = Stack()
    keys = list(model.state_dict())
    buckets = [
        _bucket(model, 64, *(f"layers.{i}" for i in range(4))),
        _bucket(model, 8),
        _bucket(model, 16, "layers.1"),
    ]
    with apply_shapes(model, buckets) as plans:
        assert [bucket.plan.predicted.plain_peak_bytes for bucket in plans.buckets] == [8, 16, 64]
        assert [_replays(model, rows) for rows in (64, 4, 8, 9, 16, 17, 64)] == [4, 0, 0, 1, 1, 4, 4]
        assert list(model.state_dict()) == keys
        twin = copy.deepcopy(model)
        assert _replays(twin, 16) == 1
        with plain(model):
            assert _replays(model, 64) == 0
        with torch.no_grad():
            model(_batch(999))  # evaluation is not weighed
        assert _replays(pickle.loads(pickle.dumps(model)), 16) == 1
        again = pickle.loads(pickle.dumps(plans.buckets))
    assert plans.counts[0] >= 2
    assert "64, 32" in str(plans)
    assert not find_patches(model)
    assert not model._forward_pre_hooks
    assert _replays(model, 16) == 0
    with apply_shapes(model, again):
        assert _replays(model, 16) == 1


@pytest.mark.slow
def test_a_batch_that_no_shape_covers() -> None:
    model = Stack()
    peak = recoup.profile(model, _batch(64)).peak_bytes
    with apply_shapes(model, [_bucket(model, 8), _bucket(model, 16, "layers.1", "layers.2")]) as plans:
        assert peak < 1 << 20
        model(_batch(64))  # weighed under the plan of the largest: it fits
        assert _replays(model, 64) == 2
        ran = []
        hook = model.layers[0].register_forward_hook(lambda m, args, out: ran.append(type(out)))
        with pytest.raises(BatchTooLarge, match=r"A batch of \[512, 32\] would peak at .*1\.0 MiB.*It was not run"):
            model(_batch(512))
        assert torch.Tensor not in ran  # fake ones alone
        hook.remove()
        assert find_patches(model)  # still in place
        assert _replays(model, 16) == 2
        with pytest.raises(BatchTooLarge, match=r"A plan fits: fit_shapes with this batch .* peaks at"):
            model(_batch(320))
        assert _replays(model, 16) == 2
    assert plans.counts[1] >= 2


def test_two_forwards_before_backward() -> None:
    model = Stack()
    buckets = [_bucket(model, 8, "layers.0"), _bucket(model, 16, "layers.0", "layers.0.norm")]
    with apply_shapes(model, buckets):
        expected = [g.grad for g in _two(copy.deepcopy(model), plain_first=True)]
        try:
            found = [g.grad for g in _two(model, plain_first=False)]
        except ReplayError:
            return  # said, not silent
        for a, b in zip(found, expected, strict=True):
            assert a is not None and b is not None
            assert torch.equal(a, b)


def _two(model: Stack, *, plain_first: bool) -> list[torch.nn.Parameter]:
    for block in model.layers:
        block.drop.p = 0.0  # type: ignore[union-attr]
    if plain_first:
        with plain(model):
            (model(_batch(16)) + model(_batch(8))).backward()
    else:
        (model(_batch(16)) + model(_batch(8))).backward()
    return list(model.parameters())


def test_a_plan_by_tensor_beside_one_by_regions() -> None:
    model = Stack()
    for block in model.layers:
        block.drop.p = 0.0  # type: ignore[union-attr]
    small = ShapePlan(
        shapes=shapes_of(_batch(64)), plan=recoup.plan(model, _batch(64), budget="min", actions=("recompute",))
    )
    large = ShapePlan(
        shapes=shapes_of(_batch(256)), plan=recoup.plan(model, _batch(256), budget="min", actions=("rebuild",))
    )
    assert [d.action for d in large.plan.decisions] == ["rebuild"]
    with apply_shapes(model, [large, small]) as plans:
        for model_of in (model, copy.deepcopy(model)):
            for size in (256, 64, 256, 30):
                given = _batch(size)
                assert same(step(model_of, given), plain_step(model_of, given))
        assert plans.counts[0] > 0 and plans.counts[1] > 0
    assert not find_patches(model)


@pytest.mark.slow
def test_refusals() -> None:
    model = Stack()
    with pytest.raises(UsageError, match="at least one batch"):
        fit_shapes(model, [], budget="1GiB")
    with pytest.raises(UsageError, match="at least one plan"):
        apply_shapes(model, [])
    with apply_shapes(model, [_bucket(model, 8, "layers.0")]), pytest.raises(ConflictError, match="already applied"):
        fit_shapes(model, [_batch(8)], budget="1GiB")
    with pytest.raises(InfeasibleBudget) as caught:
        fit_shapes(model, [_batch(8), _batch(512)], budget="300KiB")
    assert "512, 32" in caught.value.__notes__[0]
    assert not find_patches(model)


@pytest.mark.slow
def test_fitted_to_several_shapes() -> None:
    model = Stack()
    sizes = (256, 768, 1024)
    with fit_shapes(model, [_batch(n) for n in sizes], budget="70%", optimizer=torch.optim.AdamW) as plans:
        budget_bytes = plans.buckets[-1].plan.budget_bytes
        assert not plans.buckets[0].plan.decisions
        assert plans.buckets[2].plan.decisions
        ratios = [b.plan.predicted.extra_time_ratio for b in plans.buckets]
        assert ratios == sorted(ratios)
        state_bytes = 2 * sum(p.numel() * 4 for p in model.parameters())
        for size in (*sizes, 200, 700, 1000):
            given = _batch(size)
            model.zero_grad()
            held = storage_bytes([*model.parameters(), *model.buffers(), given]) + state_bytes
            run = lambda given=given: model(given).backward()  # noqa: E731
            assert measure_peak(run, device=torch.device("cpu"), held_bytes=held) <= budget_bytes
            assert same(step(model, given), plain_step(model, given))
        with pytest.raises(BatchTooLarge, match=r"A plan fits|No plan fits"):
            model(_batch(4096))
