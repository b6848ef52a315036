"""Which schedule a scan follows: what was asked for, or the fewest evaluations in a number of bytes."""

from __future__ import annotations

import dataclasses
import functools
import math

from recoup.errors import InfeasibleBudget
from recoup.recurrent.schedules.actions import Schedule
from recoup.recurrent.schedules.chunks import chunk_schedule
from recoup.recurrent.schedules.tapes import MOST_CELLS, tape_schedule
from recoup.recurrent.schedules.weighted import total_cost, weighted_tapes
from recoup.units import format_bytes, parse_budget

_MAX_UNITS = 400  # that a budget is counted in: the width of the table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Sizes of one step.

    Attributes:
        state: bytes of a held state.
        tape: bytes of a taped step, its final state included.
        in_row: bytes of a taped step that another taped step follows. Smaller than `tape`: the state between the two
            survives only where the next step's graph saved it.
        working: peak bytes of a step's forward or backward beyond its tape and the held states.
    """

    state: int
    tape: int
    in_row: int
    working: int

    def taped(self, num_steps: int) -> int:
        """Returns the bytes of `num_steps` consecutive taped steps."""
        return (num_steps - 1) * self.in_row + self.tape


def schedule_in_bytes(
    num_steps: int, budget: str | int, step: StepBytes, costs: tuple[float, ...] | None = None
) -> Schedule:
    """Returns the schedule with the fewest (or cheapest) evaluations whose memory stays within `budget`.

    Args:
        budget: bytes, `"300MiB"`, or a percentage of what all steps taped would take.
        costs: cost of evaluating each step; None if all are equal.

    Raises:
        InfeasibleBudget: if not even one taped step and its working memory fit.
    """
    budget_bytes = parse_budget(budget, plain_peak_bytes=step.taped(num_steps))
    room = budget_bytes - step.working
    if room < step.tape:
        minimum = step.working + step.tape
        raise InfeasibleBudget(
            f"recoup.recurrent.scan: budget {format_bytes(budget_bytes)} ({budget}) is below the smallest reachable "
            f"peak {format_bytes(minimum)}: one taped step takes {format_bytes(step.tape)} and running it "
            f"{format_bytes(step.working)} more. Use budget >= {minimum}, or a smaller batch.",
            budget_bytes=budget_bytes,
            minimum_bytes=minimum,
            phase="backward",
            tensors=[("one taped step", step.tape), ("a held state", step.state)],
        )
    if room >= step.taped(num_steps):
        return chunk_schedule(num_steps, num_steps)
    return _in_room(num_steps, room, step, costs)


def cost_of(schedule: Schedule, costs: tuple[float, ...] | None) -> float:
    """Returns the total cost of a schedule's evaluations: their number where all are equal."""
    return schedule.evaluations if costs is None else total_cost(schedule, costs)


@functools.lru_cache(maxsize=64)
def _in_room(num_steps: int, room: int, step: StepBytes, costs: tuple[float, ...] | None) -> Schedule:
    """Returns the best schedule of states and tapes; the answer is cached for the next training steps."""
    if costs is not None:
        state, tape, end, unit = _units(room, max(step.state, 1), step.in_row, step.tape - step.in_row)
        return weighted_tapes(costs, int(room // unit), state_units=state, tape_units=tape, end_units=end)
    found: list[Schedule] = []
    block = 1
    while block == 1 or (step.taped(block) <= room and block < num_steps):
        num_blocks = -(-num_steps // block)
        sizes = max(step.state, 1), step.in_row * block, step.tape - step.in_row
        state, tape, end, unit = _units(room, *sizes)
        units = int(room // unit)
        fits_more = step.taped(2 * block) <= room and 2 * block < num_steps
        if num_blocks * num_blocks * units <= MOST_CELLS or not (found or fits_more):
            found.append(
                tape_schedule(num_steps, units, state_units=state, tape_units=tape, end_units=end, block=block)
            )
            if found[-1].evaluations > found[0].evaluations:
                break  # still larger blocks only lose evaluations
        block *= 2
    return min(found, key=lambda schedule: schedule.evaluations)


def _units(room: int, state_bytes: int, tape_bytes: int, end_bytes: int) -> tuple[int, int, int, float]:
    """Returns the sizes of a state, a tape and a row's final state in units, and the bytes of a unit.

    The unit is chosen so that little is lost to rounding. A row of one tape always fits: its units are at most those
    of the room.
    """
    most = _MAX_UNITS
    best: tuple[float, int, int, int, float] | None = None
    for size in sorted({state_bytes, tape_bytes, end_bytes, tape_bytes + end_bytes} - {0}):
        for parts in range(1, 65):
            unit = size / parts
            if room // unit > most:
                continue
            state, tape, end = (math.ceil(b / unit - 1e-9) for b in (state_bytes, tape_bytes, end_bytes))
            if room // unit < tape + end:
                continue
            loss = state * unit / state_bytes + tape * unit / tape_bytes + (room % unit) / room
            loss += (end * unit - end_bytes) / tape_bytes
            if best is None or loss < best[0] - 1e-9:
                best = loss, state, tape, end, unit
    if best is not None:
        return best[1:]
    unit = max(room / most, 1.0)  # much room: units of their own size
    state, tape, end = (math.ceil(b / unit) for b in (state_bytes, tape_bytes, end_bytes))
    if (tape + end) * unit > room:
        whole = float(max(tape_bytes + end_bytes, state_bytes))
        return 1, 1, 0, whole if room >= whole else float(tape_bytes + end_bytes)
    return state, tape, end, unit
