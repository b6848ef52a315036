"""Steps of unequal cost: the schedule whose evaluations cost least in all, in a number of slots or units of memory.

The recurrences of `treeverse.py` and `tapes.py` over intervals of steps instead of their number (Griewank & Walther
2000 and Gruslys et al. 2016 count steps as equal). With W(i, j) the cost of steps i .. j-1, from the current state i,
with m units free:

    F(i, j, m) = min of   w_i + R(i+1, j, m - tape)                                tape the first, keep its tape
                          W(i, j) + F(i, j-1, m)                                   tape the last, do its backward
                          W(i, k) + F(k, j, m - state) + F(i, k, m), i < k < j     save state k

and R as in `tapes.py`. That takes O(T^3 m), so a longer loop is cut into blocks of steps: states are saved only between
blocks, and all steps of a block count as equal. The stated total is that of the executed schedule; for up to
`MAX_BLOCKS` steps it is the minimum.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from recoup.recurrent.schedules import tapes, treeverse
from recoup.recurrent.schedules.actions import Action, Schedule, merged, packed, simulate

MAX_BLOCKS = 80  # that a loop is divided into: the recurrence takes their third power, some seconds
_NEVER = np.inf
_LEAF, _TAPE, _RETURN = range(-1, -4, -1)


def weighted_treeverse(costs: Sequence[float], slots: int) -> Schedule:
    """Returns the cheapest schedule for `slots` states, the start state's counted; one step is taped at a time.

    Args:
        costs: cost of evaluating each step, in any unit.
        slots: states that may be held, the start state's counted.
    """
    num_steps = len(costs)
    slots = min(slots, num_steps)
    bounds = _bounds(num_steps)

    def evaluations(size: int) -> list[float]:
        return [treeverse.treeverse_evaluations(size, m + 1) for m in range(slots)]

    def actions(size: int, m: int) -> Iterator[Action]:
        return treeverse.treeverse_schedule(size, m + 1).actions()

    table = _Table(costs, bounds, slots - 1, 1, None, 0, evaluations)
    return _schedule(f"treeverse with {slots} slots, steps of unequal cost", costs, table, actions)


def weighted_tapes(
    costs: Sequence[float], units: int, *, state_units: int = 1, tape_units: int = 1, end_units: int = 0
) -> Schedule:
    """Returns the cheapest schedule in `units` of memory for states and tapes; see `tapes.tape_schedule`.

    Raises:
        ValueError: if the units do not hold one tape.
    """
    num_steps = len(costs)
    units = min(units, num_steps * max(tape_units, state_units) + end_units)
    if units < tape_units + end_units:
        raise ValueError(f"{units} units do not hold a tape of {tape_units + end_units}")

    def evaluations(size: int) -> list[float]:
        table = tapes.Table(size, units, state_units, tape_units, end_units)
        return [float(n) if n > 0 else _NEVER for n in map(table.evaluations, range(units + 1))]

    def actions(size: int, m: int) -> Iterator[Action]:
        options = {"state_units": state_units, "tape_units": tape_units, "end_units": end_units}
        return tapes.tape_schedule(size, m, **options).actions()

    table = _Table(costs, _bounds(num_steps), units, state_units, tape_units, end_units, evaluations)
    name = f"states or tapes in {units} units (state {state_units}, tape {tape_units}), steps of unequal cost"
    return _schedule(name, costs, table, actions)


def _bounds(num_steps: int) -> list[int]:
    num_blocks = min(num_steps, MAX_BLOCKS)
    return [i * num_steps // num_blocks for i in range(num_blocks + 1)]


class _Table:
    """The solved recurrence over blocks.

    Args:
        bounds: first step of each block, and the number of steps.
        units: memory besides the start state.
        tape_units: size of a kept tape; None if no tape may be kept.
        evaluations: evaluations of a number of equal steps, by units.
    """

    def __init__(
        self,
        costs: Sequence[float],
        bounds: list[int],
        units: int,
        state_units: int,
        tape_units: int | None,
        end_units: int,
        evaluations: Callable[[int], list[float]],
    ) -> None:
        self.bounds, self.units = bounds, units
        self.state_units, self.end_units = state_units, end_units
        sums = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])[bounds]
        sizes = [b - a for a, b in itertools.pairwise(bounds)]
        self.tape_units = [s * tape_units if tape_units is not None else units + 1 for s in sizes]
        num = len(sizes)
        of_size = {size: np.array(evaluations(size)) / size for size in set(sizes)}
        best = np.full((num + 1, num + 1, units + 1), _NEVER)
        row = np.full((num + 2, num + 1, units + 1), _NEVER)  # R
        self.choices = np.full((num + 1, num + 1, units + 1), _LEAF, dtype=np.int16)
        self.continues = np.zeros((num + 1, num + 1, units + 1), dtype=np.bool_)
        for j in range(num + 1):
            row[j, j, end_units:] = 0.0
        for length in range(1, num + 1):
            for i in range(num + 1 - length):
                j = i + length
                if length == 1:
                    best[i, j] = (sums[j] - sums[i]) * of_size[sizes[i]]
                else:
                    self._fill(best, sums, i, j, sizes[j - 1] == 1)
                width = units + 1 - self.tape_units[i]
                taped = np.full(units + 1, _NEVER)
                if width > 0:
                    taped[self.tape_units[i] :] = sums[i + 1] - sums[i] + row[i + 1, j, :width]
                better = taped < best[i, j]
                best[i, j][better] = taped[better]
                self.choices[i, j][better] = _TAPE
                stop = np.full(units + 1, _NEVER)
                stop[end_units:] = best[i, j, : units + 1 - end_units]
                row[i, j] = np.minimum(taped, stop)
                self.continues[i, j] = taped <= stop

    def _fill(
        self, best: npt.NDArray[np.float64], sums: npt.NDArray[np.float64], i: int, j: int, may_return: bool
    ) -> None:
        found, choice = best[i, j], self.choices[i, j]
        if may_return:
            found[:] = sums[j] - sums[i] + best[i, j - 1]
            choice[:] = _RETURN
        state, width = self.state_units, self.units + 1 - self.state_units
        if width <= 0:
            return
        k = np.arange(i + 1, j)
        split = (sums[k] - sums[i])[:, None] + best[k, j, :width] + best[i, k, state:]
        at = split.argmin(axis=0)
        least = split[at, np.arange(width)]
        better = least < found[state:]
        found[state:][better] = least[better]
        choice[state:][better] = k[at][better]


def _schedule(
    name: str, costs: Sequence[float], table: _Table, leaf: Callable[[int, int], Iterator[Action]]
) -> Schedule:
    actions = packed(merged(_actions(table, leaf)))
    evaluations = sum(stop - start for kind, start, stop in actions() if kind in ("advance", "tape"))
    return Schedule(
        name=name,
        num_steps=len(costs),
        evaluations=evaluations,
        actions=actions,
        reloads_tapes=any(t <= table.units for t in table.tape_units),
    )


def _actions(table: _Table, leaf: Callable[[int, int], Iterator[Action]]) -> Iterator[Action]:
    at = table.bounds
    current = 0
    # A stack as in `tapes._actions`: (first block, end, units, whether a block was taped just before).
    todo = [(0, len(at) - 1, table.units, False)]
    while todo:
        i, j, m, follows = todo.pop()
        if j == -1:
            yield Action("free", at[i], at[i])
            continue
        if j == -2:
            yield Action("backward", at[i], at[i + 1])
            continue
        if current != at[i]:
            yield Action("load", at[i], at[i])
            current = at[i]
        if follows and not table.continues[i, j, m]:
            follows = False
            m -= table.end_units
        choice = _TAPE if follows else int(table.choices[i, j, m])
        if choice == _LEAF:
            for kind, start, stop in leaf(at[j] - at[i], m):
                yield Action(kind, start + at[i], stop + at[i])
            current = -1
        elif choice == _TAPE:
            yield Action("tape", at[i], at[i + 1])
            current = at[i + 1]
            todo.append((i, -2, 0, False))
            if j - i > 1:
                todo.append((i + 1, j, m - table.tape_units[i], True))
        elif choice == _RETURN:
            if at[j - 1] > at[i]:
                yield Action("advance", at[i], at[j - 1])
            yield Action("tape", at[j - 1], at[j])
            yield Action("backward", at[j - 1], at[j])
            current = -1
            todo.append((i, j - 1, m, False))
        else:
            yield Action("advance", at[i], at[choice])
            yield Action("save", at[choice], at[choice])
            current = at[choice]
            todo += [(i, choice, m, False), (choice, -1, 0, False), (choice, j, m - table.state_units, False)]


@functools.lru_cache(maxsize=64)
def total_cost(schedule: Schedule, costs: tuple[float, ...]) -> float:
    """Returns the total cost of a schedule's evaluations."""
    return simulate(schedule.actions(), schedule.num_steps, step_costs=list(costs)).weighted
