"""Levels against their definition, on random orders of random graphs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from recoup.compiled import frontier
from recoup.compiled.frontier import choices
from recoup.compiled.joint_step import JointOp, JointStep
from recoup.compiled.liveness import forward_levels, levels_of
from recoup.compiled.schedule import backward_order, timeline
from tests.compiled.test_schedule import chain


def random_step(rng: random.Random, *, num_given: int = 2, num_forward: int = 12, num_ops: int = 24) -> JointStep:
    """A graph whose ops read some of what was there, a few of them elementwise, a few with two results."""
    ops: list[JointOp] = []
    num_values = num_given
    for _ in range(num_ops):
        inputs = tuple(sorted(rng.sample(range(num_values), rng.randint(1, min(3, num_values)))))
        outputs = tuple(range(num_values, num_values + rng.choice((1, 1, 1, 2))))
        num_values += len(outputs)
        over = inputs[:1] if rng.random() < 0.4 else ()
        ops.append(
            JointOp(inputs=inputs, outputs=outputs, seconds=1.0, overwritable=over, workspace_bytes=rng.randrange(9))
        )
    return JointStep(
        value_bytes=tuple(rng.choice((0, 1000, 3000, 7000)) for _ in range(num_values)),
        ops=tuple(ops),
        num_forward=num_forward,
        results=frozenset(ops[num_forward - 1].outputs),
        gradients=frozenset(ops[-1].outputs),
    )


def by_definition(
    step: JointStep, order: Sequence[int], start: frozenset[int], keeps: frozenset[int], *, overwrites: bool
) -> list[int]:
    """A value is there from where it is made to its last use before it is made again; what is kept stays."""

    def uses(at: int) -> tuple[int, ...]:
        return (*step.ops[at].inputs, *step.ops[at].outputs)

    here, levels = set(start), []
    for i, at in enumerate(order):
        op = step.ops[at]
        here.update(op.outputs)
        level = sum(step.value_bytes[v] for v in here) + op.workspace_bytes
        going = set()
        for value in here - keeps:
            later = iter(order[i + 1 :])
            used = next((n for n in later if value in uses(n)), None)
            is_used = used is not None and (value in start or value not in step.ops[used].outputs)
            # What was there at the start goes after its last use, and stays if it has none.
            is_known = value not in start or any(value in uses(n) for n in order[: i + 1])
            if is_known and not is_used:
                going.add(value)
        if overwrites and any(v in going and v not in start for v in op.overwritable):
            level -= step.value_bytes[op.outputs[0]]
        levels.append(level)
        here -= going
    return levels


@pytest.mark.parametrize("seed", range(40))
def test_levels_are_those_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    step = random_step(rng)
    held, order = backward_order(step, frozenset(v for v in step.reads if rng.random() < 0.5))
    keeps = step.results | held
    forward = by_definition(step, range(step.num_forward), frozenset(), keeps, overwrites=True)
    assert forward_levels(step, keeps) == forward
    assert levels_of(step, range(step.num_forward), start=(), keeps=keeps, overwrites=True) == forward
    for overwrites in (False, True):
        found = levels_of(step, order, start=tuple(held), keeps=step.gradients, overwrites=overwrites)
        assert found == by_definition(step, order, held, step.gradients, overwrites=overwrites)


def test_what_a_graph_is_given_is_not_written_over() -> None:
    op = JointOp(inputs=(0,), outputs=(1,), overwritable=(0,), is_fusible=True)
    step = JointStep(
        value_bytes=(1000, 1000), ops=(op,), num_forward=1, results=frozenset({1}), gradients=frozenset[int]()
    )
    for fused_reads in (0, 4):
        assert timeline(dataclasses.replace(step, fused_reads=fused_reads), frozenset()).forward_levels == (1000,)


def test_segments_are_not_looked_for_where_almost_nothing_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step = chain(24)
    cheap = [dataclasses.replace(op, seconds=1e-6) if at == 11 else op for at, op in enumerate(step.ops)]
    step = dataclasses.replace(step, ops=tuple(cheap))
    most = choices(step)[0].peak_bytes

    def never(*_: object) -> None:
        raise AssertionError("segments were solved")

    monkeypatch.setattr(frontier, "SegmentSolver", never)
    found = choices(step, enough_bytes=most - 1000)
    assert min(t.seconds for t in found if t.peak_bytes < most) == pytest.approx(1e-6)
    with pytest.raises(AssertionError):
        choices(step, enough_bytes=most // 2)


def test_choices_are_the_same_each_time() -> None:
    step = random_step(random.Random(1), num_forward=30, num_ops=60)
    for enough_bytes in (0, timeline(step, frozenset(step.reads)).peak_bytes * 3 // 4):
        one, other = (choices(dataclasses.replace(step), enough_bytes=enough_bytes) for _ in range(2))
        assert one == other
