"""What is measured on a machine that others use too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import pytest
import torch

from recoup.cost.op_memory import Timing, time_calls
from recoup.cost.op_replay import Arena
from recoup.cost.reuse import last_cache_bytes
from recoup.thresholds import NEGLIGIBLE_SHARE, SAME_SHARE

CPU = torch.device("cpu")


class Clock:
    """A clock that only calls move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for clock in ("thread_time", "perf_counter"):
            monkeypatch.setattr(time, clock, lambda: self.now)

    def takes(self, spans: Iterable[float]) -> tuple[Callable[[], None], list[float]]:
        """Returns a call that takes so long each time, and what is left of the spans."""
        left = list(spans)

        def call() -> None:
            self.now += left.pop(0)

        return call, left


@pytest.mark.parametrize("num_threads", [1, 2])
def test_time_is_the_least_of_the_runs(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    call, left = Clock(monkeypatch).takes([0.03, 0.002, 0.03, 0.03, 0.03])
    (timed,) = time_calls([Timing(call, may_be_warm=False)], Arena(CPU), limit_seconds=0.1)
    assert timed is not None
    assert timed.warm_seconds == timed.seconds
    assert timed.seconds == pytest.approx(0.002)
    assert timed.spread_seconds == pytest.approx(0.028)
    assert left == [], "to the limit, since no two of the least agree"


def test_runs_agree_where_what_they_differ_by_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    strict, of_strict = clock.takes([0.004, 0.003, 0.0035, 0.003])
    loose, of_loose = clock.takes([0.004, 0.003, 0.0035, 0.003])
    first, second = time_calls(
        [Timing(strict, may_be_warm=False, num_calls=1000), Timing(loose, may_be_warm=False, num_calls=1)],
        Arena(CPU),
        limit_seconds=0.1,
        step_seconds=0.002 / NEGLIGIBLE_SHARE,
    )
    assert (len(of_strict), len(of_loose)) == (0, 2)
    assert first is not None and second is not None
    assert first.seconds == second.seconds == pytest.approx(0.003)


def test_the_least_of_a_step_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    (small, of_small), (often, of_often), (long, of_long) = (clock.takes([s] * 4) for s in (0.001, 0.001, 0.01))
    timings = [
        Timing(small, earlier=(0.003,), may_be_warm=False),
        Timing(often, earlier=(0.003,), may_be_warm=False, num_calls=4),
        Timing(long, earlier=(0.03,), may_be_warm=False),
    ]
    arena = Touched(clock, 1000)
    timed = time_calls(timings, arena, limit_seconds=10.0, step_seconds=0.0149 / SAME_SHARE)
    assert (len(of_small), len(of_often), len(of_long)) == (4, 2, 2), "3 and 12 ms are more than 14.9, together"
    assert [t and (t.seconds, t.is_rough) for t in timed] == [
        (pytest.approx(0.003), True),
        (pytest.approx(0.001), False),
        (pytest.approx(0.01), False),
    ]
    assert len(arena.nbytes) == 2
    arena.nbytes.clear()
    assert all(time_calls(timings[:2], arena, limit_seconds=10.0, step_seconds=0.0151 / SAME_SHARE))
    assert not arena.nbytes, "nor are the caches emptied for it"


def test_one_warm_run_is_enough_where_it_agrees_with_cold_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    call, left = Clock(monkeypatch).takes([0.003, 0.003, 0.00298, 9.0])
    (timed,) = time_calls([Timing(call)], Arena(CPU), limit_seconds=0.1)
    assert left == [9.0] and timed is not None
    assert (timed.seconds, timed.warm_seconds) == (pytest.approx(0.003), pytest.approx(0.00298))


def test_ops_find_nothing_of_their_arguments_in_the_cache() -> None:
    """A copy that fits a core's cache takes several times as long from memory, one of a batch too."""
    x = torch.ones(4, 1 << 16)
    y = torch.empty_like(x)
    timings = [Timing(lambda source=source, to=to: to.copy_(source)) for source, to in zip(x, y, strict=True)]
    ratios = [0.0] * len(timings)
    arena = Arena(CPU, cache_bytes=last_cache_bytes())
    for _ in range(5):  # whoever else uses the last cache leaves nothing warm for a while
        for i, timed in enumerate(time_calls(timings, arena, limit_seconds=0.05)):
            assert timed is not None
            ratios[i] = max(ratios[i], timed.seconds / timed.warm_seconds)
    assert min(ratios) > 1.5, ratios


def test_what_fails_the_second_time_has_no_time_and_spoils_no_other() -> None:
    runs = []

    def call() -> torch.Tensor:
        runs.append(1)
        if len(runs) > 1:
            raise MemoryError
        return torch.ones(8)

    failed, timed = time_calls([Timing(call), Timing(lambda: torch.ones(8))], Arena(CPU), limit_seconds=0.01)
    assert failed is None and len(runs) == 2
    assert timed is not None and timed.seconds > 0


class Touched(Arena):
    """Notes what is touched between the rounds, which takes a second each time on the clock that is given."""

    def __init__(self, clock: Clock, cache_bytes: int) -> None:
        super().__init__(CPU, cache_bytes=cache_bytes)
        self.clock, self.nbytes = clock, list[int]()

    def touch(self, nbytes: int) -> None:
        self.nbytes.append(nbytes)
        self.clock.now += 1.0


def test_what_ops_that_take_turns_touch_need_not_be_touched_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr("recoup.cost.op_memory.flush_bytes", lambda nbytes: 2 * nbytes)
    arena = Touched(clock, 1000)
    (agrees, _), (differs, _) = clock.takes([0.1, 0.1]), clock.takes([0.3, 0.2, 0.1, 0.1])
    timings = [
        Timing(agrees, may_be_warm=False, touched_bytes=300),
        Timing(differs, may_be_warm=False, touched_bytes=500),
    ]
    assert all(time_calls(timings, arena, limit_seconds=100.0))
    assert arena.nbytes == [2000 - 300, 2000 - 300, 2000, 2000], "the one that is left alone touches nothing for itself"


def test_emptying_the_caches_counts_toward_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    arena = Touched(clock, 1000)
    call, left = clock.takes([0.004, 0.003, 0.002, 0.001, 0.001])
    (timed,) = time_calls([Timing(call, may_be_warm=False)], arena, limit_seconds=2.5)
    assert timed is not None and len(arena.nbytes) == 3 and len(left) == 2


def test_an_op_that_is_left_for_lack_of_time_is_timed_warm_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    call, _ = clock.takes([0.4, 0.3, 0.1, 0.1])
    (timed,) = time_calls([Timing(call)], Touched(clock, 1000), limit_seconds=1.5)
    assert timed is not None
    assert (timed.seconds, timed.warm_seconds) == (pytest.approx(0.3), pytest.approx(0.1))
