"""Counts against the published optimum, by brute force and by following the schedules."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from recoup.errors import InfeasibleBudget
from recoup.recurrent.choose import StepBytes, schedule_in_bytes
from recoup.recurrent.schedules import tapes
from recoup.recurrent.schedules.actions import Action, simulate
from recoup.recurrent.schedules.chunks import chunk_schedule, default_chunk
from recoup.recurrent.schedules.tapes import tape_schedule
from recoup.recurrent.schedules.treeverse import treeverse_schedule


@functools.cache
def _treeverse(n: int, s: int) -> int:
    """Griewank & Walther's recurrence, without the closed form."""
    if n == 1:
        return 0
    if s == 1:
        return n * (n - 1) // 2
    return min(k + _treeverse(n - k, s - 1) + _treeverse(k, s) for k in range(1, n))


def _gruslys(num_steps: int, units: int, state: int, tape: int) -> np.ndarray:
    never = 1 << 60
    f = np.full((num_steps + 1, units + 1), never, dtype=np.int64)
    f[0], f[1, tape:] = 0, 1
    for n in range(2, num_steps + 1):
        f[n] = np.minimum(never, n + f[n - 1])
        if units >= tape:
            f[n, tape:] = np.minimum(f[n, tape:], 1 + f[n - 1, : units + 1 - tape])
        for k in range(1, n if units >= state else 1):
            f[n, state:] = np.minimum(f[n, state:], k + f[n - k, : units + 1 - state] + f[k, state:])
    return f


@pytest.mark.parametrize(
    ("num_steps", "counts"),
    [
        (64, (484, 322, 264, 220, 201, 178)),
        (256, (3864, 2101, 1586, 1206, 1060, 919)),
        (1000, (29820, 13155, 8998, 6284, 5285, 4440)),
    ],
)
def test_treeverse_counts(num_steps: int, counts: tuple[int, ...]) -> None:
    for slots, count in zip((2, 3, 4, 6, 8, 12), counts, strict=True):
        schedule = treeverse_schedule(num_steps, slots)
        found = simulate(schedule.actions(), num_steps)
        assert (found.evaluations, found.taped, schedule.evaluations) == (count, num_steps, count)
        assert found.peak_states <= slots


@pytest.mark.parametrize(("num_steps", "num_rows"), [(16, 2), (12, 3), (24, 2)])
def test_as_many_evaluations_in_fewer_rows(num_steps: int, num_rows: int) -> None:
    """Where chunks are the best that fits, the schedule has no more backward passes than chunks have."""
    length = num_steps // num_rows
    schedule = tape_schedule(num_steps, 8 * length + num_rows - 1, state_units=1, tape_units=8)
    assert schedule.evaluations <= chunk_schedule(num_steps, length).evaluations
    assert sum(action.kind == "backward" for action in schedule.actions()) == num_rows


def test_treeverse_is_optimal_where_brute_force_reaches() -> None:
    for num_steps in range(1, 45):
        for slots in range(1, 9):
            schedule = treeverse_schedule(num_steps, slots)
            found = simulate(schedule.actions(), num_steps)
            assert found.evaluations == schedule.evaluations == num_steps + _treeverse(num_steps, slots)


def test_chunks() -> None:
    for num_steps in range(1, 30):
        for chunk in range(1, 32):
            schedule = chunk_schedule(num_steps, chunk)
            assert simulate(schedule.actions(), num_steps).evaluations == schedule.evaluations
    assert default_chunk(100) == 10


@pytest.mark.parametrize(("state", "tape"), [(1, 1), (1, 3), (2, 3), (3, 2), (3, 7), (5, 1), (1, 10)])
def test_states_or_tapes_are_optimal(state: int, tape: int) -> None:
    num_steps, units = 60, 40
    best = _gruslys(num_steps, units, state, tape)
    for memory in range(tape, units):
        schedule = tape_schedule(num_steps, memory, state_units=state, tape_units=tape)
        found = simulate(schedule.actions(), num_steps, state_units=state, tape_units=tape)
        assert found.evaluations == schedule.evaluations == best[num_steps, memory]
        assert found.peak_units <= memory


@functools.cache
def _in_rows(n: int, m: int, follows: bool, sizes: tuple[int, int, int]) -> int:
    """The fewest evaluations where a taped step that another follows need not hold the state between."""
    state, tape, end = sizes
    never = 1 << 30
    if m < 0:
        return never
    if n == 0:
        return 0 if m >= end or not follows else never
    on = 1 + _in_rows(n - 1, m - tape, True, sizes)
    if follows:
        return min(on, _in_rows(n, m - end, False, sizes))
    splits = [k + _in_rows(n - k, m - state, False, sizes) + _in_rows(k, m, False, sizes) for k in range(1, n)]
    back = n + _in_rows(n - 1, m, False, sizes) if n > 1 else never
    return min(never, on, back, *splits)


@pytest.mark.parametrize("sizes", [(1, 1, 0), (1, 2, 1), (2, 3, 2), (3, 1, 3), (1, 5, 1)])
def test_rows_of_tapes_are_optimal(sizes: tuple[int, int, int]) -> None:
    state, tape, end = sizes
    options = {"state_units": state, "tape_units": tape, "end_units": end}
    for num_steps in range(1, 26, 3):
        for units in range(tape + end, 24):
            schedule = tape_schedule(num_steps, units, **options)
            found = simulate(schedule.actions(), num_steps, **options)
            assert found.evaluations == schedule.evaluations == _in_rows(num_steps, units, False, sizes)
            assert found.peak_units <= units
    with pytest.raises(ValueError, match=str(tape + end)):
        tape_schedule(9, tape + end - 1, **options)


def test_gruslys_1000_steps() -> None:
    """Evaluations a step in 2, 5, 10 and 20 % of the full tape, a tape taking what a state takes."""
    found = [tape_schedule(1000, units).evaluations / 1000 for units in (20, 50, 100, 200)]
    assert found == [2.849, 1.976, 1.91, 1.805]


def test_the_search_for_long_loops_is_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tapes, "MOST_CELLS", 0)
    for state, tape in ((1, 1), (1, 3), (3, 2)):
        best = _gruslys(150, 40, state, tape)
        table = tapes.Table(150, 40, state, tape)
        for memory in range(tape, 41):
            assert best[150, memory] <= table.evaluations(memory) <= 1.01 * best[150, memory]


def test_long_loops_do_not_recurse() -> None:
    schedule = treeverse_schedule(100_000, 40)
    assert simulate(schedule.actions(), 100_000).evaluations == schedule.evaluations


def test_the_simulator_refuses_what_is_no_schedule() -> None:
    for actions in (
        [Action("advance", 1, 2)],
        [Action("load", 1, 1)],
        [Action("tape", 0, 1)],
        [Action("advance", 0, 2), Action("tape", 2, 3), Action("backward", 1, 2)],
    ):
        with pytest.raises(ValueError):
            simulate(iter(actions), 3)


def test_bytes() -> None:
    step = StepBytes(state=100, tape=350, in_row=350, working=900)
    last = 1 << 60
    for budget in range(1_300, 40_000, 900):
        schedule = schedule_in_bytes(100, budget, step)
        found = simulate(schedule.actions(), 100, state_units=100, tape_units=350)
        assert found.peak_units + step.working <= budget
        assert schedule.evaluations <= 1.05 * last  # units are whole numbers
        last = schedule.evaluations
    assert last == 100
    with pytest.raises(InfeasibleBudget, match="1250"):
        schedule_in_bytes(100, 1_249, step)
    assert schedule_in_bytes(100, 1_250, step).evaluations >= 100


def test_blocks_of_steps() -> None:
    for num_steps, block in ((50, 3), (64, 8), (7, 4), (100, 1)):
        schedule = tape_schedule(num_steps, 12, state_units=1, tape_units=2 * block // 3 + 1, block=block)
        found = simulate(schedule.actions(), num_steps, state_units=1, tape_units=1)
        assert found.evaluations == schedule.evaluations
        assert found.taped == num_steps


def test_much_room_in_a_long_loop_is_used() -> None:
    """Half of all tapes: the first half of the steps is evaluated twice, the others once."""
    step = StepBytes(state=100, tape=300, in_row=300, working=0)
    for num_steps in (2000, 20_000):
        schedule = schedule_in_bytes(num_steps, num_steps * 150, step)
        found = simulate(schedule.actions(), num_steps, state_units=100, tape_units=300)
        assert found.peak_units <= num_steps * 150
        assert found.evaluations == schedule.evaluations <= 1.51 * num_steps
