"""Scans in the solver's view of a step: each is one part of its call, priced with all its steps taped and with less.

A scan (`recoup.recurrent.scan`) of T steps whose schedule the user left open runs in as many bytes as the plan says,
from all steps taped (nothing runs twice) down to one taped step. `fold` makes one run of ops of it, whatever modules
its steps call: those are no calls of their own to a plan. `with_rungs` adds to the prices of these ops what they are in
less memory: as many bytes less held and at every peak, and the seconds of the steps that run again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from recoup.ir.decision import Ambient, Decision, Scan, Tile
from recoup.ir.trace import Call, Trace
from recoup.solver.problem import Block, Leaf, Option, Problem
from recoup.solver.sequence import Choice
from recoup.solver.ways import Run, RungOf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One way to run a leaf's scans in fewer bytes than with all steps taped.

    Attributes:
        scan_bytes: of each scan.
        freed_bytes: less than with all steps taped.
        seconds: of what runs again.
    """

    scan_bytes: tuple[int, ...]
    freed_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The scans of one leaf.

    Attributes:
        path, call: of the call whose own forward runs them.
        scans: their numbers in that call.
        first_ops: where they begin.
        taped_bytes: of each, enough to tape all its steps.
        rungs: by the action its steps run under, with falling bytes.
    """

    path: str
    call: int
    scans: tuple[int, ...]
    first_ops: tuple[int, ...]
    taped_bytes: tuple[int, ...]
    needed_bytes: tuple[int, ...]
    rungs: dict[Ambient, tuple[Rung, ...]]

    def decisions(self, scan_bytes: Sequence[int]) -> tuple[Decision, ...]:
        """Returns the decisions that give each scan its bytes."""
        each = zip(self.scans, scan_bytes, strict=True)
        return tuple(Scan(path=self.path, call=self.call, index=scan, budget_bytes=nbytes) for scan, nbytes in each)


def fold(trace: Trace, ranges: Sequence[tuple[int, int]]) -> Trace:
    """Returns the trace with the forward of each scan as one run of ops of the call whose own forward runs it.

    Args:
        ranges: the ops [first, last) of each scan's first forward.
    """
    calls = list(trace.calls)
    ops = list(trace.ops)
    owner_of: dict[int, int] = {}
    for first, last in ranges:
        inside = [
            i for i, c in enumerate(calls) if first <= c.first_op and c.last_op <= last and c.last_op > c.first_op
        ]
        owner = _innermost(trace.calls, first, last, inside)
        for n, i in enumerate(inside):
            at = last if n == len(inside) - 1 else first  # where the run of ops begins and ends
            calls[i] = dataclasses.replace(calls[i], first_op=at, last_op=at, replay_stop_op=-1, parent=owner)
            owner_of[i] = owner
        above = owner
        while above >= 0:
            calls[above] = dataclasses.replace(
                calls[above],
                refusal=calls[above].refusal or "it runs a scan, which recomputes by itself",
                chained=False,
            )
            above = calls[above].parent
    for i, op in enumerate(ops):
        if op.call in owner_of:
            ops[i] = dataclasses.replace(op, call=owner_of[op.call])
    return dataclasses.replace(trace, ops=tuple(ops), calls=tuple(calls))


def _innermost(calls: Sequence[Call], first: int, last: int, inside: Sequence[int]) -> int:
    """Returns the innermost call around ops [first, last) that is none of those `inside`; -1 if none is."""
    around = [i for i, c in enumerate(calls) if c.first_op <= first and last <= c.last_op and i not in set(inside)]
    return around[-1] if around else -1


def with_rungs(options: Sequence[Option], ladders: Sequence[Ladder], which: int) -> tuple[Option, ...]:
    """Returns a leaf's options, each followed by its rungs."""
    found = []
    for option in options:
        found.append(option)
        for number, rung in enumerate(ladders[which].rungs.get(option.ambient, ())):
            found.append(
                dataclasses.replace(
                    option,
                    rung=RungOf(ladder=which, number=number),
                    saved_bytes=max(option.saved_bytes - rung.freed_bytes, 0),
                    forward_bytes=max(option.forward_bytes - rung.freed_bytes, 0),
                    backward_bytes=max(option.backward_bytes - rung.freed_bytes, 0),
                    extra_seconds=option.extra_seconds + rung.seconds,
                )
            )
    return tuple(found)


def those_under(options: Sequence[Option], action: Ambient) -> tuple[Option, ...]:
    """Returns the options under an action, rungs included; those under the first one where there is none."""
    found = tuple(o for o in options if o.ambient == action)
    return found or those_under(options, options[0].ambient)


def under(problem: Problem, ladders: Sequence[Ladder], action: Ambient) -> Problem:
    """Returns the problem in which the calls that run scans do so under one action, and only bytes are left to choose.

    The engine sets the action for the whole call, so its other leaves follow.
    """
    owners = {(ladder.path, ladder.call) for ladder in ladders}

    def narrow(part: Leaf | Block) -> Leaf | Block:
        if isinstance(part, Block):
            return dataclasses.replace(part, parts=tuple(narrow(p) for p in part.parts))
        if part.owner not in owners:
            return part
        return dataclasses.replace(part, options=those_under(part.options, action), group=-1)

    return dataclasses.replace(problem, parts=tuple(narrow(p) for p in problem.parts))


def chosen_bytes(choice: Choice, ladders: Sequence[Ladder]) -> Iterator[tuple[int, ...]]:
    """Yields for each ladder the bytes of its scans that a choice gives them: on no rung, enough to tape all steps."""
    chosen = {}
    for run in _runs(choice):
        if run.rung is not None:
            rungs = ladders[run.rung.ladder].rungs[run.ambient]
            chosen[run.rung.ladder] = rungs[run.rung.number].scan_bytes
    for which, ladder in enumerate(ladders):
        yield chosen.get(which, ladder.taped_bytes)


def _runs(choice: Choice) -> Iterable[Run]:
    for pick in choice:
        if isinstance(pick.way, Run):
            yield pick.way
        else:
            yield from _runs(pick.inner)


def split_scans(decisions: Sequence[Decision]) -> tuple[tuple[Scan, ...], tuple[Decision, ...]]:
    """Returns the decisions about scans, and the others."""
    scans = tuple(d for d in decisions if isinstance(d, Scan))
    return scans, tuple(d for d in decisions if not isinstance(d, Scan))


def with_scans(decisions: Sequence[Decision], scans: Sequence[Decision]) -> tuple[Decision, ...]:
    """Returns the decisions with others about scans; those that tile stay last."""
    rest = split_scans(decisions)[1]
    at = next((i for i, d in enumerate(rest) if isinstance(d, Tile)), len(rest))
    return (*rest[:at], *scans, *rest[at:])


def merged(ladders: Iterable[Sequence[Rung]]) -> tuple[Rung, ...]:
    """Returns the rungs of several scans as those of one: a step down is taken where a byte costs the fewest seconds.

    A step counts as part of the straight stretch of its scan's convex hull, so that a dear step before cheap ones is
    taken with them.

    Args:
        ladders: of each scan, the first rung all steps taped.
    """
    each = list(ladders)
    slopes = [_hull_slopes(rungs) for rungs in each]
    at = [0] * len(each)
    found: list[Rung] = []
    while True:
        left = [(slopes[i][at[i]], i) for i, rungs in enumerate(each) if at[i] + 1 < len(rungs)]
        if not left:
            return tuple(found)
        at[min(left)[1]] += 1
        now = [rungs[n] for rungs, n in zip(each, at, strict=True)]
        found.append(
            Rung(
                scan_bytes=tuple(b for rung in now for b in rung.scan_bytes),
                freed_bytes=sum(rung.freed_bytes for rung in now),
                seconds=sum(rung.seconds for rung in now),
            )
        )


def _hull_slopes(rungs: Sequence[Rung]) -> list[float]:
    """Returns, for each step down a ladder, the slope (seconds a byte) of the convex hull there."""
    hull: list[int] = []
    for i in range(len(rungs)):
        while len(hull) > 1 and _slope(rungs[hull[-2]], rungs[hull[-1]]) >= _slope(rungs[hull[-1]], rungs[i]):
            hull.pop()
        hull.append(i)
    return [_slope(rungs[a], rungs[b]) for a, b in itertools.pairwise(hull) for _ in range(a, b)]


def _slope(a: Rung, b: Rung) -> float:
    return (b.seconds - a.seconds) / max(b.freed_bytes - a.freed_bytes, 1)
