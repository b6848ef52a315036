"""Schedules: sequences of actions on a loop of steps, and a simulator that checks them.

A loop has steps `0 .. T-1` and states `0 .. T`: step `t` turns state `t` into state `t + 1`. The *current state* is the
one the loop stands at. A step is *evaluated* either plainly or taped, that is with its autograd graph; its backward
needs the tape. Schedules differ in which states and tapes they hold in the meantime.

[Note: schedules]
1. The loop stands at state 0, which is held. It must do the backward of steps T-1, ..., 0, in this order.
2. "advance" and "tape" begin at the current state and move it to the end of the steps that they evaluate.
3. "backward" of a step needs its tape and lets it go. "load" needs the state to be held.
4. Cost is the number of step evaluations, plain and taped alike; memory is the most states and tapes held at once.

Example: T = 3 with room for one state and one tape: advance 0-1, save 1, advance 1-2, tape 2, backward 2; load 1,
tape 1, backward 1; load 0, tape 0, backward 0. Five evaluations instead of three, one tape at a time instead of three.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

import numpy as np

Kind = Literal["advance", "save", "load", "free", "tape", "backward"]


class Action(NamedTuple):
    """One action of a schedule.

    Attributes:
        kind: "advance": evaluate steps `start .. stop-1` plainly. "tape": evaluate them taped, keep the tapes.
            "save": hold the current state, which is state `start`. "load": make state `start` current again, from the
            held state or from the held tape of step `start - 1`. "free": drop state `start`. "backward": of the taped
            steps `stop-1 .. start`, last first; it frees their tapes.
        start: first step, or the state.
        stop: one past the last step; equal to `start` for a state.
    """

    kind: Kind
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How a loop of `num_steps` is run forward and backward.

    Attributes:
        name: as it is printed.
        num_steps: T.
        evaluations: number of step evaluations, the first forward included.
        actions: returns a new iterator over the actions at each call.
        reloads_tapes: whether a "load" takes a state that only a tape holds.
    """

    name: str
    num_steps: int
    evaluations: int
    actions: Callable[[], Iterator[Action]]
    reloads_tapes: bool = False


def packed(actions: Iterator[Action]) -> Callable[[], Iterator[Action]]:
    """Returns a function that yields the same actions again, stored in twelve bytes each."""
    kinds = get_args(Kind)
    codes = {kind: code for code, kind in enumerate(kinds)}
    rows = np.array([(codes[kind], start, stop) for kind, start, stop in actions], dtype=np.int32).reshape(-1, 3)

    def unpacked() -> Iterator[Action]:
        for first in range(0, len(rows), 4096):
            for code, start, stop in rows[first : first + 4096].tolist():
                yield Action(kinds[code], start, stop)

    return unpacked


def merged(actions: Iterator[Action]) -> Iterator[Action]:
    """Yields the actions with consecutive "tape" actions merged into one, and consecutive "backward" actions too."""
    last: Action | None = None
    for action in actions:
        if last is not None:
            if action.kind == last.kind == "tape" and action.start == last.stop:
                last = Action("tape", last.start, action.stop)
                continue
            if action.kind == last.kind == "backward" and action.stop == last.start:
                last = Action("backward", action.start, last.stop)
                continue
            yield last
        last = action
    if last is not None:
        yield last


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Cost and memory of a schedule.

    Attributes:
        evaluations: number of step evaluations.
        taped: number of taped ones among them.
        weighted: evaluations weighted by cost.
        peak_units: peak of states and tapes held at once, in units, the start state not counted.
        peak_states: the most states held at once, the start state counted.
    """

    evaluations: int
    taped: int
    weighted: float
    peak_units: int
    peak_states: int


def simulate(
    actions: Iterator[Action],
    num_steps: int,
    *,
    state_units: int = 1,
    tape_units: int = 0,
    end_units: int = 0,
    step_costs: list[float] | None = None,
) -> Simulation:
    """Follows a schedule without running a step, and checks that it is valid.

    Args:
        actions: the schedule's actions.
        num_steps: T.
        state_units: size of a held state.
        tape_units: size of a taped step.
        end_units: size of the state after a row of tapes, where the tapes do not hold it.
        step_costs: cost of each step; 1 if left out.

    Raises:
        ValueError: if an action needs a state or a tape that is not there, or a step's backward is missing.
    """
    current = 0
    states = {0}
    tapes: list[int] = []
    rows: list[int] = []  # steps whose tape ends a row of consecutive tapes, so far
    is_row = False
    evaluations = taped = peak_units = 0
    peak_states = 1
    weighted = 0.0
    left = num_steps
    for action in actions:
        kind, start, stop = action
        if kind in ("advance", "tape"):
            if start != current or stop <= start:
                raise ValueError(f"{action}: the loop stands at {current}")
            current = stop
            evaluations += stop - start
            weighted += sum(step_costs[start:stop]) if step_costs is not None else stop - start
            if kind == "tape":
                taped += stop - start
                tapes.extend(range(start, stop))
                if is_row:
                    rows.pop()
                rows.append(stop - 1)
            is_row = kind == "tape"
        elif kind == "save":
            if start != current or start in states:
                raise ValueError(f"{action}: the loop stands at {current}, held are {sorted(states)}")
            states.add(start)
        elif kind == "load":
            if start not in states and start - 1 not in tapes:
                raise ValueError(f"{action}: held are {sorted(states)}")
            current = start
            is_row = False
        elif kind == "free":
            states.remove(start)
        else:
            for step in range(stop - 1, start - 1, -1):
                if step != left - 1 or not tapes or tapes.pop() != step:
                    raise ValueError(f"{action}: step {step} is not the one whose backward comes next, or has no tape")
                left = step
                if rows and rows[-1] == step:
                    rows.pop()
            is_row = False
        peak_states = max(peak_states, len(states))
        held_units = (len(states) - 1) * state_units + len(tapes) * tape_units + len(rows) * end_units
        peak_units = max(peak_units, held_units)
    if left:
        raise ValueError(f"{left} steps are left without a backward")
    return Simulation(
        evaluations=evaluations, taped=taped, weighted=weighted, peak_units=peak_units, peak_states=peak_states
    )
