"""A plan in place: exact, structure untouched, undone without a trace."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import recoup
from recoup.cost.model import FlopsCost
from recoup.ir.decision import Rebuild, Recompute, Rederive, Save
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions
from tests.models import KINDS, make, same, step
from tests.thorough import thorough

STACK = {
    "every block": [Recompute(path=f"layers.{i}") for i in range(4)],
    "nested": [
        Recompute(path="layers.0"),
        Recompute(path="layers.0.up"),
        Recompute(path="layers.0.act", inside="rederive"),
    ],
    "span": [Recompute(path="layers.0", span=("layers.1", "layers.2"), inside="rederive")],
    "spans in a span": [
        Recompute(path="layers.0", span=("layers.1", "layers.2", "layers.3")),
        Recompute(path="layers.0", span=("layers.1",)),
        Recompute(path="layers.1"),
        Recompute(path="layers.2", span=("layers.3",), inside="rederive"),
        Rederive(path="layers.3"),
    ],
    "a region in itself": [
        Recompute(path="layers.1", span=("layers.2",)),
        Recompute(path="layers.1"),
        Recompute(path="layers.1", inside="rederive"),
    ],
    "rederive": [Rederive(path="")],
    "rederive but one": [Rederive(path=""), Save(path="layers.2")],
    "rederive below a region": [
        Recompute(path="layers.1"),
        Rederive(path="layers.1.act"),
    ],
    "mixed": [
        Rederive(path=""),
        Recompute(path="layers.0", inside="rederive"),
        Recompute(path="layers.3"),
    ],
    "one call": [Recompute(path="layers.0", call=0)],
    "the model itself": [Recompute(path="")],
}


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("name", STACK)
def test_bit_equal(name: str, batch_norm: bool) -> None:
    kind = "batch-norm" if batch_norm else "stack"
    model, batch, loss = make(kind)
    expected = step(make(kind)[0], batch, loss)
    before = execution_context.counters()
    with apply_decisions(model, STACK[name]):
        assert same(step(model, batch, loss), expected)
    after = execution_context.counters()
    num_regions = sum(d.is_region for d in STACK[name])
    assert after[0] - before[0] == num_regions
    assert not any("forward" in m.__dict__ for m in model.modules())


_SLOW = [pytest.param("gpt2", marks=pytest.mark.slow), pytest.param("llama", marks=(pytest.mark.slow, thorough))]


@pytest.mark.parametrize("kind", [*KINDS[:3], *_SLOW])
def test_plans_are_bit_equal_at_every_budget(kind: str) -> None:
    model, batch, loss = make(kind)
    expected = step(make(kind)[0], batch, loss)
    curve = recoup.frontier(model, batch, loss=loss, cost=FlopsCost(), num_points=6)
    assert len(curve.points) > 1
    for point in curve.points:
        twin = make(kind)[0]
        with recoup.apply(twin, point.plan):
            assert same(step(twin, batch, loss), expected), point.plan.decisions


def test_structure_is_untouched() -> None:
    model, batch, loss = make("gpt2")
    plan = recoup.plan(model, batch, budget="80%", cost=FlopsCost())
    assert plan.decisions
    keys, names = list(model.state_dict()), [n for n, _ in model.named_modules()]
    kind = type(model)
    applied = recoup.apply(model, plan)
    assert list(model.state_dict()) == keys
    assert [n for n, _ in model.named_modules()] == names
    assert type(model) is kind
    expected = step(make("gpt2")[0], batch, loss)

    twin = copy.deepcopy(model)
    assert same(step(twin, batch, loss), expected)
    assert all(p.grad is None for p in model.parameters())  # the copy trains itself, not the original

    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert same(step(loaded, batch, loss), expected)

    with applied.suspended():
        before = execution_context.counters()
        assert same(step(model, batch, loss), expected)
        assert execution_context.counters() == before
    applied.remove()
    applied.remove()
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_no_grad_runs_nothing_twice_and_training_flags_hold() -> None:
    model, batch, _ = make("stack")
    calls = []
    model.layers[0].register_forward_hook(lambda *a: calls.append(1))
    with apply_decisions(model, STACK["every block"]):
        with torch.no_grad():
            model(batch)
        with torch.inference_mode():
            model(batch)
        assert len(calls) == 2
        step(model, batch)
        assert len(calls) == 3  # the region's own hooks run once, outside


def test_model_is_freed_by_reference_count() -> None:
    model, batch, _ = make("stack")
    apply_decisions(model, STACK["mixed"])
    step(model, batch)
    alive = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_a_plan_of_another_model_is_refused(tmp_path) -> None:
    model, batch, _ = make("stack")
    plan = recoup.plan(model, batch, budget="70%", cost=FlopsCost())
    plan.save(tmp_path / "plan.json")
    loaded = recoup.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    other = make("batch-norm")[0]
    with pytest.raises(recoup.PlanMismatch, match="another model"):
        recoup.apply(other, loaded)
    assert not any("forward" in m.__dict__ for m in other.modules())


def test_conflicts_are_refused() -> None:
    model, batch, _ = make("llama")
    model.gradient_checkpointing_enable() if not hasattr(
        model, "activation_checkpointing_enable"
    ) else model.activation_checkpointing_enable()
    with pytest.raises(recoup.ConflictError, match="checkpointing"):
        recoup.plan(model, batch, budget="70%", cost=FlopsCost())
    model, batch, _ = make("stack")
    plan = recoup.plan(model, batch, budget="70%", cost=FlopsCost())
    recoup.apply(model, plan)
    with pytest.raises(recoup.ConflictError, match="already applied"):
        recoup.apply(model, plan)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("kind", ["every block", "rebuild"])
def test_a_copys_plan_can_be_taken_off(copied: Callable[[nn.Module], nn.Module], kind: str) -> None:
    model, batch, _ = make("stack")
    before = apply_decisions(model, [Rebuild(path="")] if kind == "rebuild" else STACK[kind])
    twin = copied(model)
    before.remove()
    assert recoup.Applied.on(model) is None
    applied = recoup.Applied.on(twin)
    assert applied is not None
    twin(batch).backward()
    applied.remove()
    assert recoup.Applied.on(twin) is None
    assert not any("forward" in m.__dict__ for m in twin.modules())


def test_weights_changed_before_backward_are_noticed() -> None:
    model, batch, _ = make("stack")
    with apply_decisions(model, STACK["every block"]):
        loss = model(batch)
        with torch.no_grad():
            model.layers[1].up.weight.add_(1.0)
        with pytest.raises(recoup.ReplayError, match=r"layers\.1.*was changed in place between forward and backward"):
            loss.backward()
