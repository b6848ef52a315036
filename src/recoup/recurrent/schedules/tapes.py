"""States or tapes: the fewest step evaluations in a given memory, which may hold both states and taped steps.

Gruslys et al. 2016 (arXiv 1606.03401), "mixed" memorisation, by dynamic programming. Memory is counted in units; a
state takes `state_units`, a taped step `tape_units`. For n steps from the current state, with m units free:

    F(n, m) = min of   1 + F(n - 1, m - tape)                         tape the first step, keep its tape
                       n + F(n - 1, m)                                advance to the last step, tape it, do its backward
                       k + F(n - k, m - state) + F(k, m), 0 < k < n   save a state k steps on
    F(1, m) = 1 where m >= tape

The full search over k is O(T^2 m). In loops too long for it, k is searched near the best one of n - 1; the result is
then still a valid schedule with the stated count, but its optimality is not proven (F is not convex in n). The tests
bound the gap. The start state is not counted: the caller holds it.

Consecutive taped steps need not hold the states between them beyond what their tapes save of these. With `end_units`
for the state after such a row, where its tapes do not hold it, the first case becomes 1 + R(n - 1, m - tape), with

    R(n, m) = min of   1 + R(n - 1, m - tape)                         tape the next step too
                       F(n, m - end)                                  hold the state; go on from there
    R(0, m) = 0 where m >= end

Of schedules with as many evaluations, one with the fewest rows of consecutive taped steps is taken: each row is a
backward of its own. The tables count a row as a small part of an evaluation, so small that all rows are less than one.

Steps can be grouped: a block of b steps is one step of the recurrence, with a tape of b tapes. Long loops are then
solved in full, at a few more evaluations than single steps would need.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from recoup.recurrent.schedules.actions import Action, Schedule, merged, packed

_NEVER = int(np.iinfo(np.int64).max) // 4  # more than any schedule counts, and a sum of three still fits
_RETURN, _TAPE = range(-1, 1)
MOST_CELLS = 400_000_000  # steps * steps * units, some seconds: in larger tables a split is looked for near the last
_WINDOW = np.arange(-24, 25)[:, None]


class Table:
    """The solved recurrence: `evaluations(n, m)` and the first decision, `choice(n, m)`.

    A choice is the number of steps to advance before a state is saved, 0 to tape the first step, -1 to tape the last.
    `continues(n, m)`: whether to tape the next step right after a taped one.
    """

    def __init__(self, num_steps: int, units: int, state_units: int, tape_units: int, end_units: int = 0) -> None:
        self.units = units
        self.state_units = state_units
        self.tape_units = tape_units
        self.end_units = end_units
        self._weight = weight = num_steps + 1  # of an evaluation, where a row counts 1
        cost = np.full((num_steps + 1, units + 1), _NEVER, dtype=np.int64)
        choices = np.zeros((num_steps + 1, units + 1), dtype=np.int32)
        continues = np.zeros((num_steps + 1, units + 1), dtype=np.bool_)
        cost[0] = 0
        cost[1, tape_units + end_units :] = weight + 1
        in_row = np.full(units + 1, _NEVER, dtype=np.int64)  # R of n - 1
        in_row[end_units:] = 0
        in_row, continues[1] = self._taped_on(in_row, cost[1])
        if units >= state_units:
            memory = np.arange(state_units, units + 1)
            split = np.ones(len(memory), dtype=np.int64)
        is_long = num_steps * num_steps * units > MOST_CELLS
        for n in range(2, num_steps + 1):
            best = np.minimum(n * weight + 1 + cost[n - 1], _NEVER)
            choice = np.full(units + 1, _RETURN, dtype=np.int32)
            if units >= state_units:
                found, split = self._split(cost, n, memory, split if is_long else None)
                better = found < best[state_units:]
                best[state_units:][better] = found[better]
                choice[state_units:][better] = split[better]
            if units >= tape_units:
                taped = weight + 1 + in_row[: units + 1 - tape_units]
                better = taped <= best[tape_units:]
                best[tape_units:][better] = taped[better]
                choice[tape_units:][better] = _TAPE
            cost[n], choices[n] = best, choice
            in_row, continues[n] = self._taped_on(in_row, best)
        self._choices = choices
        self._continues = continues
        self._last_row = cost[num_steps].copy()

    def _taped_on(
        self, in_row: npt.NDArray[np.int64], best: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Returns R(n, .) from R(n - 1, .) and F(n, .), and where taping the next step is better."""
        tape, end = min(self.tape_units, self.units + 1), min(self.end_units, self.units + 1)
        on = np.full(self.units + 1, _NEVER, dtype=np.int64)
        on[tape:] = self._weight + in_row[: self.units + 1 - tape]
        stop = np.full(self.units + 1, _NEVER, dtype=np.int64)
        stop[end:] = best[: self.units + 1 - end]
        return np.minimum(np.minimum(on, stop), _NEVER), on <= stop

    def _split(
        self,
        cost: npt.NDArray[np.int64],
        n: int,
        memory: npt.NDArray[np.int64],
        near: npt.NDArray[np.int64] | None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the cost of the best splits of `n` and the splits; the search is full, or near the splits `near`."""
        columns = np.arange(len(memory))
        if near is None:
            k = np.arange(1, n)[:, None]
            total = k * self._weight + cost[n - 1 : 0 : -1, : len(memory)] + cost[1:n, self.state_units :]
        else:
            k = np.clip(near + _WINDOW, 1, n - 1)
            total = k * self._weight + cost[n - k, columns] + cost[k, memory]
        at = total.argmin(axis=0)
        best = total[at, columns]
        return best, np.broadcast_to(k, total.shape)[at, columns]

    def evaluations(self, units: int | None = None) -> int:
        """Returns the step evaluations of the whole loop; -1 if the units do not hold one tape."""
        total = int(self._last_row[self.units if units is None else units])
        return total // self._weight if total < _NEVER else -1

    def choice(self, n: int, m: int) -> int:
        """Returns the first choice for `n` steps and `m` units."""
        return int(self._choices[n, m])

    def continues(self, n: int, m: int) -> bool:
        """Whether to tape the next of `n` steps right after a taped one, without holding the state between them."""
        return n > 0 and bool(self._continues[n, m])


@functools.lru_cache(maxsize=4)
def solve(num_steps: int, units: int, state_units: int, tape_units: int, end_units: int = 0) -> Table:
    """Returns the solved table."""
    return Table(num_steps, units, state_units, tape_units, end_units)


def tape_schedule(
    num_steps: int, units: int, *, state_units: int = 1, tape_units: int = 1, end_units: int = 0, block: int = 1
) -> Schedule:
    """Returns the optimal schedule in `units` of memory.

    Args:
        num_steps: T.
        units: memory for states and tapes.
        state_units: size of a held state.
        tape_units: size of the tape of a whole block.
        end_units: size of the state after a row of tapes, where the tapes do not hold it.
        block: steps that are grouped into one; the first block may be shorter.

    Raises:
        ValueError: if the units do not hold one tape.
    """
    num_blocks = -(-num_steps // block)
    units = min(units, num_blocks * max(tape_units, state_units) + end_units)
    if units < tape_units + end_units:
        raise ValueError(f"{units} units do not hold a tape of {tape_units + end_units}")
    table = solve(num_blocks, units, state_units, tape_units, end_units)
    actions = packed(merged(_in_steps(_actions(table, num_blocks), num_steps, block)))
    evaluations = table.evaluations()
    if block > 1:  # the first block may be shorter
        evaluations = sum(stop - start for kind, start, stop in actions() if kind in ("advance", "tape"))
    return Schedule(
        name=f"states or tapes{f' of {block} steps' if block > 1 else ''} in {units} units (state {state_units}, tape "
        f"{tape_units})",
        num_steps=num_steps,
        evaluations=evaluations,
        actions=actions,
        reloads_tapes=True,
    )


def _in_steps(actions: Iterator[Action], num_steps: int, block: int) -> Iterator[Action]:
    """Yields actions on blocks as actions on steps; the first block has the remaining steps."""
    missing = -num_steps % block
    for kind, start, stop in actions:
        yield Action(kind, max(start * block - missing, 0), max(stop * block - missing, 0))


def _actions(table: Table, num_steps: int) -> Iterator[Action]:
    current = 0
    # A stack of parts to do: (first step, end, units, whether a step was taped just before). `end` is -1 to free a
    # state and -2 for a backward.
    todo = [(0, num_steps, table.units, False)]
    while todo:
        start, end, m, follows = todo.pop()
        if end == -1:
            yield Action("free", start, start)
            continue
        if end == -2:
            yield Action("backward", start, start + 1)
            continue
        if current != start:
            yield Action("load", start, start)
            current = start
        n = end - start
        if follows and not table.continues(n, m):
            follows = False
            m -= table.end_units
        choice = _TAPE if follows or n == 1 else table.choice(n, m)
        if choice == _TAPE:
            yield Action("tape", start, start + 1)
            current = start + 1
            todo.append((start, -2, 0, False))
            if n > 1:
                todo.append((start + 1, end, m - table.tape_units, True))
        elif choice == _RETURN:
            yield Action("advance", start, end - 1)
            yield Action("tape", end - 1, end)
            yield Action("backward", end - 1, end)
            current = end
            todo.append((start, end - 1, m, False))
        else:
            middle = start + choice
            yield Action("advance", start, middle)
            yield Action("save", middle, middle)
            current = middle
            todo += [(start, middle, m, False), (middle, -1, 0, False), (middle, end, m - table.state_units, False)]
