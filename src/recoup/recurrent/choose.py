"""Which schedule a scan follows: what was asked for, or the fewest evaluations in a number of bytes."""

from __future__ import annotations

import dataclasses
import math

from recoup.errors import InfeasibleBudget
from recoup.recurrent.schedules.actions import Schedule
from recoup.recurrent.schedules.chunks import chunk_schedule
from recoup.recurrent.schedules.tapes import tape_schedule
from recoup.units import format_bytes, parse_budget

_MAX_UNITS = 400
_MAX_WORK = 400_000_000  # of one table: steps * steps * units, some seconds
_NUM_BLOCKS_TRIED = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """What one step takes.

    Attributes:
        state: a held state. tape: a taped step, the state it comes to included. working: the most that running a step
            forward or backward needs besides its tape and held states.
    """

    state: int
    tape: int
    working: int


def schedule_in_bytes(num_steps: int, budget: str | int, step: StepBytes) -> Schedule:
    """Returns the schedule with the fewest evaluations that holds and works within `budget`.

    Args:
        budget: bytes, `"300MiB"`, or a percentage of what all steps taped would take.

    Raises:
        InfeasibleBudget: if not even one taped step and its working memory fit.
    """
    budget_bytes = parse_budget(budget, plain_peak_bytes=num_steps * step.tape)
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
    if room >= num_steps * step.tape:
        return chunk_schedule(num_steps, num_steps)
    found: list[Schedule] = []
    block = 1
    while len(found) < _NUM_BLOCKS_TRIED and (block == 1 or (block * step.tape <= room and block < num_steps)):
        num_blocks = -(-num_steps // block)
        state, tape, unit = _units(room, max(step.state, 1), step.tape * block)
        units = int(room // unit)
        fits_more = 2 * block * step.tape <= room and 2 * block < num_steps
        if num_blocks * num_blocks * units <= _MAX_WORK or not (found or fits_more):
            found.append(tape_schedule(num_steps, units, state_units=state, tape_units=tape, block=block))
        block *= 2
    return min(found, key=lambda schedule: schedule.evaluations)


def _units(room: int, state_bytes: int, tape_bytes: int) -> tuple[int, int, float]:
    """Returns what a state and a tape take in units, and the unit's bytes, with little lost to rounding up."""
    most = _MAX_UNITS
    best: tuple[float, int, int, float] | None = None
    for size in (state_bytes, tape_bytes):
        for parts in range(1, 65):
            unit = size / parts
            if room // unit > most or room < math.ceil(tape_bytes / unit) * unit:
                continue
            state, tape = math.ceil(state_bytes / unit - 1e-9), math.ceil(tape_bytes / unit - 1e-9)
            loss = state * unit / state_bytes + tape * unit / tape_bytes + (room % unit) / room
            if best is None or loss < best[0] - 1e-9:
                best = loss, state, tape, unit
    if best is None:  # much room: units of their own size
        unit = max(room / most, 1.0)
        state, tape = math.ceil(state_bytes / unit), math.ceil(tape_bytes / unit)
        if tape * unit > room:
            return 1, 1, float(max(tape_bytes, state_bytes)) if room >= state_bytes else float(tape_bytes)
        return state, tape, unit
    return best[1], best[2], best[3]
