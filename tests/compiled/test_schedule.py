"""Orders and levels of compiled steps, on graphs small enough to work out by hand."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from recoup.compiled import frontier
from recoup.compiled.combine import StepLevels, combinations, combined
from recoup.compiled.frontier import choices, undominated
from recoup.compiled.joint_step import JointOp, JointStep
from recoup.compiled.schedule import Timeline, backward_order, timeline


def chain(num: int, *, nbytes: int = 1000) -> JointStep:
    """A chain y_i = f(y_{i-1}) whose backward reads every y_i: values 0..num-1, gradients num..2 num - 1."""
    forward = [JointOp(inputs=(i - 1,) if i else (), outputs=(i,), seconds=1.0) for i in range(num)]
    backward = []
    for k, i in enumerate(reversed(range(num))):
        before = (num + k - 1,) if k else ()
        backward.append(JointOp(inputs=(i, *before), outputs=(num + k,)))
    return JointStep(
        value_bytes=(nbytes,) * (2 * num),
        ops=(*forward, *backward),
        num_forward=num,
        results=frozenset({num - 1}),
        gradients=frozenset({2 * num - 1}),
    )


def test_rebuilds_run_right_before_they_are_needed() -> None:
    step = chain(4)
    held, order = backward_order(step, frozenset({1, 3}))
    assert held == {1, 3}
    # Backward of 3, then 2 is made from 1, backward of 2 and 1, then 0, and its backward.
    assert order == (4, 2, 5, 6, 0, 7)


def test_what_cannot_run_again_is_held() -> None:
    ops = list(chain(3).ops)
    ops[1] = JointOp(inputs=(0,), outputs=(1,), seconds=1.0, can_rerun=False)
    step = JointStep(
        value_bytes=(1000,) * 6, ops=tuple(ops), num_forward=3, results=frozenset({2}), gradients=frozenset({5})
    )
    held, order = backward_order(step, frozenset({2}))
    assert 1 in held and 1 not in order


def test_levels_of_a_chain() -> None:
    made = timeline(chain(4), frozenset({0, 1, 2, 3}))
    assert made.forward_levels == (1000, 2000, 3000, 4000)
    assert made.backward_levels == (5000, 5000, 4000, 3000)
    assert made.held_bytes == 3000  # the result is the caller's
    assert made.seconds == 0


def test_gradients_that_torch_holds_for_all_of_backward() -> None:
    bare = chain(3)
    first = dataclasses.replace(bare.ops[3], inputs=(2, 6))  # reads the gradient of the result
    given = dataclasses.replace(
        bare, ops=(*bare.ops[:3], first, *bare.ops[4:]), value_bytes=(1000,) * 7, tangents=frozenset({6})
    )
    let_go = timeline(given, frozenset({0, 1, 2}))
    held = timeline(dataclasses.replace(given, keeps_tangents=True), frozenset({0, 1, 2}))
    assert let_go.backward_levels == (5000, 4000, 3000)
    assert held.backward_levels == (5000, 5000, 4000)
    assert held.forward_levels == let_go.forward_levels and held.held_bytes == let_go.held_bytes


def test_a_generators_state_is_there_from_an_ops_run_to_the_one_again() -> None:
    bare = chain(4)
    ops = list(bare.ops)
    for at in (0, 2):
        ops[at] = dataclasses.replace(ops[at], is_random=True, state_bytes=100)
    plain = timeline(bare, frozenset({1, 3}))
    made = timeline(dataclasses.replace(bare, ops=tuple(ops)), frozenset({1, 3}))
    # Backward runs 4, 2 again, 5, 6, 0 again, 7.
    assert [a - b for a, b in zip(made.forward_levels, plain.forward_levels, strict=True)] == [100, 100, 200, 200]
    behind = [a - b for a, b in zip(made.backward_levels, plain.backward_levels, strict=True)]
    # While one draws again, the state that it found is there too.
    assert behind == [200, 300, 100, 100, 200, 0]
    assert made.held_bytes - plain.held_bytes == 200


def test_elementwise_values_are_not_stored_where_kernels_are_fused() -> None:
    ops = (
        JointOp(inputs=(), outputs=(0,)),
        JointOp(inputs=(0,), outputs=(1,), is_fusible=True, reads_fusible=True),
        JointOp(inputs=(1,), outputs=(2,), reads_fusible=True),
    )
    bare = {"value_bytes": (100, 100, 1), "ops": ops, "num_forward": 3, "gradients": frozenset[int]()}
    separate = timeline(JointStep(**bare, results=frozenset({2})), frozenset())
    fused = timeline(JointStep(**bare, results=frozenset({2}), fused_reads=4), frozenset())
    assert separate.forward_peak_bytes == 200
    assert fused.forward_peak_bytes == 101


def test_what_is_dropped_is_made_anew_for_each_op_that_needs_it() -> None:
    ops = list(chain(3).ops)
    ops[5] = JointOp(inputs=(0, 1, 4), outputs=(5,))  # the last one of backward reads 1 again
    step = dataclasses.replace(chain(3), ops=tuple(ops))
    assert backward_order(step, frozenset({0, 2}))[1] == (3, 1, 4, 5)
    assert backward_order(step, frozenset({0, 2}), frozenset({1}))[1] == (3, 1, 4, 1, 5)
    made = timeline(step, frozenset({0, 2}), frozenset({1}))
    assert made.seconds == 2 and made.dropped == {1}


def test_what_backward_makes_itself_may_come_late_and_run_again() -> None:
    """Values 0, 1 of forward; backward makes 2 from 1, 3 from 2 and 0, and returns 4, made from 2 and 3."""
    ops = (
        JointOp(inputs=(), outputs=(0,)),
        JointOp(inputs=(0,), outputs=(1,)),
        JointOp(inputs=(1,), outputs=(2,), seconds=1.0, flops=7),
        JointOp(inputs=(0, 2), outputs=(3,)),
        JointOp(inputs=(2, 3), outputs=(4,)),
    )
    step = JointStep(value_bytes=(1000,) * 5, ops=ops, num_forward=2, results=frozenset({1}), gradients=frozenset({4}))
    held = frozenset({0, 1})
    assert 2 in step.droppable and 4 not in step.droppable
    assert timeline(step, held).order == (2, 3, 4)
    made = timeline(step, held, frozenset({2}))
    assert made.order == (2, 3, 2, 4) and made.seconds == 1
    # 1 stays for the second run, 2 is let go in between.
    assert made.backward_levels == (3000, 4000, 3000, 3000)
    assert timeline(step, held).backward_levels == (3000, 3000, 3000)


def test_what_lets_go_of_more_than_it_makes_comes_early_in_a_rebuild() -> None:
    ops = (
        JointOp(inputs=(), outputs=(0,)),
        JointOp(inputs=(0,), outputs=(1,)),
        JointOp(inputs=(1,), outputs=(2,)),
        JointOp(inputs=(2,), outputs=(3,)),
        JointOp(inputs=(1,), outputs=(4,)),
        JointOp(inputs=(3, 4), outputs=(5,)),
        JointOp(inputs=(5,), outputs=(6,)),
        JointOp(inputs=(5,), outputs=(7,)),
    )
    step = JointStep(
        value_bytes=(10, 1000, 100, 100, 100, 10, 10, 10),
        ops=ops,
        num_forward=7,
        results=frozenset({6}),
        gradients=frozenset({7}),
    )
    assert backward_order(step, frozenset({0}), frozenset({1}))[1] == (1, 2, 4, 3, 5, 7)
    assert backward_order(step, frozenset({0}))[1] == (1, 2, 3, 4, 5, 7)  # 1 might be read later


def test_a_parameters_gradient_comes_before_the_next_gradient_and_may_be_written_over() -> None:
    ops = (
        JointOp(inputs=(), outputs=(0,)),
        JointOp(inputs=(1,), outputs=(2,)),  # a gradient
        JointOp(inputs=(2,), outputs=(3,), overwritable=(2,)),  # the next one, read by the last op
        JointOp(inputs=(0, 2), outputs=(4,)),  # a parameter's
        JointOp(inputs=(3, 0), outputs=(5,)),
    )
    step = JointStep(
        value_bytes=(100,) * 6,
        ops=ops,
        num_forward=1,
        results=frozenset(),
        gradients=frozenset({4, 5}),
        tangents=frozenset({1}),
    )
    held = frozenset({0})
    assert backward_order(step, held)[1] == (1, 3, 2, 4)
    assert timeline(step, held).backward_levels == (300, 300, 300, 400)  # 2, when nothing reads it any more, becomes 3
    assert timeline(step, held, given=((0,), (1, 2, 3, 4))).backward_levels == (300, 300, 400, 400)


def test_no_choice_beats_another_in_peak_held_bytes_and_seconds() -> None:
    found = choices(chain(24))
    for one, other in itertools.permutations(found, 2):
        assert one.peak_bytes > other.peak_bytes or one.seconds > other.seconds or one.held_bytes > other.held_bytes
    # Of a graph that is alone only peak and seconds count.
    curve = [t for t in found if all(t.peak_bytes < o.peak_bytes for o in found if o.seconds < t.seconds)]
    assert len(curve) > 4
    # A chain of n in about 2 sqrt(n) (Chen et al. 2016): all of 24 and their gradients, against a third and less.
    assert found[-1].peak_bytes <= 0.5 * min(found, key=lambda t: t.seconds).peak_bytes
    assert found[-1].peak_bytes == min(t.peak_bytes for t in found)


def test_no_leaner_choice_is_looked_for_than_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = 0

    def counted(*args: Any, **kwargs: Any) -> Timeline:
        nonlocal simulated
        simulated += 1
        return timeline(*args, **kwargs)

    monkeypatch.setattr(frontier, "timeline", counted)
    step = chain(24)
    every = choices(step)
    num_every, simulated = simulated, 0
    enough_bytes = every[0].peak_bytes * 3 // 4
    found = choices(step, enough_bytes=enough_bytes)
    assert simulated < num_every / 2
    least = [min(t.seconds for t in of if t.peak_bytes <= enough_bytes) for of in (every, found)]
    assert least[1] <= least[0]


def test_choices_beat_random_ones() -> None:
    step = chain(12)
    found = choices(step)
    rng = random.Random(0)
    for _ in range(300):
        made = timeline(step, frozenset(v for v in range(12) if rng.random() < rng.random()))
        least = min((c.seconds for c in found if c.peak_bytes <= made.peak_bytes), default=None)
        assert least is None or least <= made.seconds + 2  # of 12: segments end at waists only


def test_one_budget_over_several_graphs() -> None:
    steps = {"a": chain(8), "b": chain(8, nbytes=4000)}
    calls = ("a", "b", "a")
    options = {name: choices(step) for name, step in steps.items()}
    found = combinations(steps, calls, options)
    assert found == sorted(found, key=lambda c: -c.peak_bytes)
    fastest = combined(steps, calls, [min(options[name], key=lambda t: t.seconds) for name in calls])
    assert found[0].peak_bytes <= fastest.peak_bytes and found[0].seconds == 0
    assert found[-1].peak_bytes < 0.75 * fastest.peak_bytes
    assert undominated(list(options["a"])) == options["a"]


def test_a_metered_call_is_shifted_by_what_a_choice_changes() -> None:
    step = chain(8)
    ran, made = timeline(step, frozenset(range(8))), timeline(step, frozenset({3, 7}))
    # Backward ran 300 above its simulation (zeros for a result without a gradient, which are not there when it begins).
    levels = StepLevels(
        chosen=(ran,),
        forward=(ran.forward_peak_bytes,),
        backward=(ran.backward_peak_bytes + 300,),
        between=(0, ran.held_bytes),
    )
    found = combined({"a": step}, ("a",), [made], levels)
    assert made.peak_bytes < ran.peak_bytes
    assert found.peak_bytes == made.backward_peak_bytes + 300


def test_a_result_that_is_held_no_more_is_the_callers_until_backward() -> None:
    step = chain(8)
    ran = dataclasses.replace(timeline(step, frozenset(step.reads)), held_bytes=500, held_result_bytes=300)
    lean = dataclasses.replace(ran, held_result_bytes=0)
    levels = StepLevels(chosen=(ran, ran), forward=(900, 2000), backward=(1000, 1100), between=(0, 800, 1200))
    steps = {"a": step, "b": step}
    assert combined(steps, ["a", "b"], [lean, ran], levels).peak_bytes == 2000  # forward of b: it is there
    levels = dataclasses.replace(levels, forward=(900, 1000), backward=(1000, 2000))
    assert combined(steps, ["a", "b"], [lean, ran], levels).peak_bytes == 1700  # backward of b: it is not


def test_what_a_graph_hands_to_the_next_is_held_by_either() -> None:
    step = dataclasses.replace(chain(2), value_bytes=(1000,) * 5, activations=frozenset({4}))
    reading = dataclasses.replace(
        step, ops=(dataclasses.replace(step.ops[0], inputs=(4,)), *step.ops[1:])
    )  # value 4 is what the op that can run again reads
    ran = timeline(reading, frozenset({0, 1}))
    lean = timeline(reading, frozenset({1}))
    assert (ran.held_input_bytes, lean.held_input_bytes) == (0, 1000)
    ran = dataclasses.replace(ran, held_result_bytes=0)
    none = dict(forward_levels=(0,), backward_levels=(0,), held_bytes=0)
    ran, lean = (dataclasses.replace(made, **none) for made in (ran, lean))  # type: ignore[arg-type]
    levels = StepLevels(chosen=(ran, ran), forward=(0, 0), backward=(0, 5000), between=(0, 0, 0))
    steps, calls = {"a": reading, "b": reading}, ["a", "b"]

    def peak(a: Timeline, b: Timeline, then: Timeline) -> int:
        return combined(steps, calls, [a, b], dataclasses.replace(levels, chosen=(then, ran))).peak_bytes

    kept = dataclasses.replace(ran, held_result_bytes=1000)
    assert peak(ran, lean, ran) == 6000  # the second reads it again in backward
    assert peak(ran, lean, kept) == 5000  # the first held it before
    assert peak(kept, lean, kept) == 5000  # both do, once
