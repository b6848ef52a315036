"""Ways to run a scan: one layout of its body for all steps, chunks of steps run again as one, or two stretches."""

from __future__ import annotations

from collections.abc import Collection

from recoup.jax.cost import Costs
from recoup.jax.labels import cuts, is_loop, thinned, uniform, ways
from recoup.jax.layout import Piece, Scan, Segment
from recoup.jax.program import Program
from recoup.thresholds import MOST_POINTS, MOST_TRIES


def body_ways(
    program: Program, active: Collection[int], costs: Costs, *, exact: bool, most: int = MOST_POINTS
) -> list[tuple[Segment, ...]]:
    """Returns layouts of a scan's body, the plain one first: as one segment, and cut at its waists at a few prices."""
    num_units = len(program.units)
    found = ways(program, 0, num_units, active, costs, most=most)
    places = cuts(program, 0, num_units, active, exact=exact)
    for cut in thinned(program, places, active, exact=exact):
        if len(cut) > 2:
            found += uniform(program, cut, active, costs, most=MOST_POINTS // 4)
    inner = [u.index for u in program.units if is_loop(program, u.index, active)]
    return list(dict.fromkeys(_with_inner_loops(program, layout, inner, active, costs) for layout in found))


def _with_inner_loops(
    program: Program, layout: tuple[Segment, ...], inner: list[int], active: Collection[int], costs: Costs
) -> tuple[Segment, ...]:
    """Returns the layout with the loops inside the body run again step by step, where their segment runs again."""
    if not inner:
        return layout
    found = []
    for segment in layout:
        scans = []
        for unit in inner:
            if segment.first <= unit < segment.last and segment.recompute:
                body = program.bodies[unit]
                whole = (Segment(first=0, last=len(body.units), recompute=True),)
                steps = program.units[unit].num_steps
                scans.append(Scan(unit=unit, pieces=(Piece(num_steps=steps, body=whole),)))
        found.append(
            Segment(
                first=segment.first,
                last=segment.last,
                recompute=segment.recompute,
                held=segment.held,
                scans=tuple(scans),
            )
        )
    return tuple(found)


def chunk_sizes(num_steps: int) -> list[int]:
    """Returns the even chunks nearest to the square root of the number of steps, the best of one level."""
    even = [k for k in range(2, num_steps // 2 + 1) if num_steps % k == 0]
    root = num_steps**0.5
    return sorted(sorted(even, key=lambda k: max(k / root, root / k))[:MOST_TRIES])


def whole_scan(unit: int, num_steps: int, body: tuple[Segment, ...], chunk: int = 0) -> Segment:
    """Returns the segment that runs all steps of the scan alike."""
    pieces = (Piece(num_steps=num_steps, chunk=chunk, body=body),)
    return Segment(first=unit, last=unit + 1, scans=(Scan(unit=unit, pieces=pieces),))


def split_scan(unit: int, num_steps: int, first_steps: int, first: Segment, second: Segment) -> Segment:
    """Returns the segment that runs the first steps as `first` does and the rest as `second` does."""
    (before,), (after,) = first.scans[0].pieces, second.scans[0].pieces
    pieces = (
        Piece(num_steps=first_steps, body=before.body),
        Piece(num_steps=num_steps - first_steps, body=after.body),
    )
    return Segment(first=unit, last=unit + 1, scans=(Scan(unit=unit, pieces=pieces),))
