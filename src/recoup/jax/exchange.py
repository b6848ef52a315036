"""Layouts next to one that leaves bytes of a budget over: what runs again for the fewest bytes is held as well."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from recoup.jax.cost import Costs
from recoup.jax.labels import held_problem
from recoup.jax.layout import EVERYTHING, Layout, Piece, Scan
from recoup.jax.options import body_active
from recoup.jax.program import Program
from recoup.solver.held import Addition, additions
from recoup.solver.held import Segment as HeldProblem

Path = tuple[int, ...]
"""A segment's place: its number among its neighbours, inside parts, scans, pieces and bodies."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Place:
    """A segment that runs again: the values that may be held, and those that are. num_times: runs of its body."""

    program: Program
    problem: HeldProblem
    held: set[int]
    num_times: int
    best: Addition | None = None

    def look(self, room_bytes: int) -> None:
        """Finds the value worth most for its bytes, of those that there is room for."""
        found = (a for a in additions(self.problem, self.held) if a.nbytes * self.num_times <= room_bytes)
        self.best = max(found, key=lambda a: a.seconds / max(a.nbytes, 1), default=None)


def holding_more(program: Program, layout: Layout, active: Collection[int], costs: Costs, *, room_bytes: int) -> Layout:
    """Returns the layout with more values held: in turn the one that spares most seconds a byte, `room_bytes` in all.

    Args:
        program: the program. layout: of it. active: its values that carry a derivative. costs: seconds of equations.
    """
    places = dict(_places(program, layout, active, costs, (), 1))
    for place in places.values():
        place.look(room_bytes)
    while True:
        hopeful = [p for p in places.values() if p.best is not None]
        if not hopeful:
            return _with(layout, places, ())
        place = max(hopeful, key=lambda p: p.best.seconds / max(p.best.nbytes, 1) if p.best else 0.0)
        assert place.best is not None, "hopeful"
        if place.best.nbytes * place.num_times <= room_bytes:
            room_bytes -= place.best.nbytes * place.num_times
            place.held.add(place.best.value)
        place.look(room_bytes)


def _places(
    program: Program, segments: Layout, active: Collection[int], costs: Costs, path: Path, num_times: int
) -> Iterator[tuple[Path, _Place]]:
    for i, segment in enumerate(segments):
        here = (*path, i)
        yield from _places(program, segment.parts, active, costs, (*here, 0), num_times)
        for j, scan in enumerate(segment.scans):
            body = program.bodies[scan.unit]
            inside = body_active(program, scan.unit, active)
            for k, piece in enumerate(scan.pieces):
                steps = num_times * (piece.chunk or piece.num_steps)
                yield from _places(body, piece.body, inside, costs, (*here, 1, j, k), steps)
        if segment.recompute and not segment.parts and not segment.offloaded and segment.held != (EVERYTHING,):
            names = frozenset(segment.held)
            units = program.units[segment.first : segment.last]
            yield (
                here,
                _Place(
                    program=program,
                    problem=held_problem(program, segment.first, segment.last, active, costs),
                    held={v for u in units for v in u.outputs if program.name(v) in names},
                    num_times=num_times,
                ),
            )


def _with(segments: Layout, places: dict[Path, _Place], path: Path) -> Layout:
    """Returns the segments with what `places` says held."""
    found = []
    for i, segment in enumerate(segments):
        here = (*path, i)
        scans = tuple(
            Scan(
                unit=scan.unit,
                pieces=tuple(
                    Piece(num_steps=p.num_steps, chunk=p.chunk, body=_with(p.body, places, (*here, 1, j, k)))
                    for k, p in enumerate(scan.pieces)
                ),
            )
            for j, scan in enumerate(segment.scans)
        )
        held = segment.held
        if here in places:
            place = places[here]
            held = tuple(dict.fromkeys((*held, *(place.program.name(v) for v in sorted(place.held)))))
        found.append(
            dataclasses.replace(segment, held=held, scans=scans, parts=_with(segment.parts, places, (*here, 0)))
        )
    return tuple(found)
