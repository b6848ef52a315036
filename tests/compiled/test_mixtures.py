"""Choices for the calls of equal graphs: a few for each graph, none worse than one that all calls share."""

from __future__ import annotations

import itertools
import random

import pytest

from recoup.compiled.combine import Combination, StepLevels, combinations, combined
from recoup.compiled.joint_step import JointOp, JointStep
from recoup.compiled.schedule import Timeline
from recoup.thresholds import MOST_WAYS

RNG = random.Random(0)


def step(nbytes: int = 100) -> JointStep:
    ops = (JointOp(inputs=(0,), outputs=(1,)), JointOp(inputs=(2,), outputs=(3,)))
    return JointStep(
        value_bytes=(0, nbytes, nbytes, nbytes),
        ops=ops,
        num_forward=1,
        results=frozenset({1}),
        gradients=frozenset({3}),
        tangents=frozenset({2}),
    )


def options(num: int) -> list[Timeline]:
    """Returns choices of less and less held bytes that take more and more."""
    held, seconds, found = 1000, 0.0, []
    for i in range(num):
        found.append(
            Timeline(
                held=frozenset({i}),
                dropped=frozenset(),
                order=(),
                forward_levels=(held + 50,),
                backward_levels=(held + 300 + RNG.randrange(100) + 60 * i,),
                held_bytes=held,
                held_result_bytes=RNG.choice([0, 40]),
                seconds=seconds,
            )
        )
        held, seconds = held - RNG.randrange(100, 300), seconds + RNG.randrange(1, 5)
    return found


def levels(calls: tuple[str, ...], chosen: tuple[Timeline, ...]) -> StepLevels:
    def some(num: int) -> tuple[int, ...]:
        return tuple(RNG.randrange(3000, 4000) + 800 * i for i in range(num))

    return StepLevels(chosen=chosen, forward=some(len(calls)), backward=some(len(calls)), between=some(len(calls) + 1))


def least_seconds(found: list[Combination], peak_bytes: int) -> float:
    return min((c.seconds for c in found if c.peak_bytes <= peak_bytes), default=float("inf"))


@pytest.mark.parametrize("is_metered", [True, False])
def test_mixtures_are_nearly_as_good_as_all_there_are(is_metered: bool) -> None:
    for _ in range(8):
        calls = ("a", "b", "a", "b", "a", "a")
        made = {"a": options(4), "b": options(3)}
        steps = {"a": step(), "b": step(300)}
        ran = levels(calls, tuple(made[name][0] for name in calls)) if is_metered else None
        found = combinations(steps, calls, made, ran, divisible=("a", "b"))
        assert [c.peak_bytes for c in found] == sorted((c.peak_bytes for c in found), reverse=True)
        for one in found:
            assert one == combined(steps, calls, one.chosen, ran)
            for name in "ab":
                own = {c.held for c, n in zip(one.chosen, calls, strict=True) if n == name}
                assert len(own) <= MOST_WAYS
        every = [combined(steps, calls, c, ran) for c in itertools.product(*(made[name] for name in calls))]
        lowest = min(c.peak_bytes for c in every)
        assert found[-1].peak_bytes <= lowest * 1.02
        for peak in range(found[-1].peak_bytes, found[0].peak_bytes, 100):
            assert least_seconds(found, round(peak * 1.02)) <= least_seconds(every, peak) + 2


def test_no_mixture_is_worse_than_a_choice_that_all_calls_share() -> None:
    for num in (1, 3, 40):
        calls = ("first", *("block",) * num)
        made = {"first": options(5), "block": options(12)}
        steps = {"first": step(), "block": step()}
        ran = levels(calls, tuple(made[name][0] for name in calls))
        shared = combinations(steps, calls, made, ran)
        found = combinations(steps, calls, made, ran, divisible=("first", "block"))
        assert all(len(set(c.chosen[1:])) == 1 for c in shared)
        assert all(least_seconds(found, c.peak_bytes) <= c.seconds for c in shared)
        assert found == combinations(steps, calls, made, ran, divisible=("block", "first"))
        if num == 40:
            assert any(least_seconds(found, c.peak_bytes) < 0.8 * c.seconds for c in shared)
            assert any(len(set(c.chosen[1:])) == MOST_WAYS for c in found)


def test_what_is_not_divisible_shares_a_choice() -> None:
    calls = ("a", "b", "a", "b", "a")
    made = {"a": options(4), "b": options(4)}
    found = combinations({"a": step(), "b": step()}, calls, made, divisible=("b",))
    assert any(len({c.chosen[1], c.chosen[3]}) == 2 for c in found)
    assert all(len({c.chosen[0], c.chosen[2], c.chosen[4]}) == 1 for c in found)
