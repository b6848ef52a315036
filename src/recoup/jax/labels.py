"""Ways to run a stretch of units: saved by JAX, or run again around held values; proposed by minimum cuts."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Sequence

from recoup.jax._jax import has_effects
from recoup.jax.cost import Costs
from recoup.jax.layout import EVERYTHING, Segment
from recoup.jax.linear import reads_of
from recoup.jax.program import Program
from recoup.solver.held import Held, Op, cheapest, hull, trade_offs
from recoup.solver.held import Segment as HeldProblem
from recoup.solver.waists import waists

# A waist is the narrowest place until so many times the bytes that cross it are made, on either side. Finer where
# coarser segments would change the order of sums.
_REACHES = (2, 1)
_STRIDES = (1, 2, 4)


def held_problem(program: Program, first: int, last: int, active: Collection[int], costs: Costs) -> HeldProblem:
    """Returns what to choose among units [first, last): values by their numbers in the program."""
    sizes = [0] * len(program.avals)
    ops, reads = [], set()
    for unit in program.units[first:last]:
        carrying = [i for i, o in enumerate(unit.operands) if isinstance(o, int) and o in active]
        is_asked = any(v in active for v in unit.outputs)
        found = reads_of(unit, carrying if is_asked else ())
        reads |= {o for i in found.operands if isinstance(o := unit.operands[i], int)}
        reads |= {unit.outputs[i] for i in found.outputs}
        ops.append(Op(inputs=unit.inputs, outputs=unit.outputs, seconds=costs.seconds(unit.eqn)))
        for value in unit.outputs:
            sizes[value] = program.nbytes(value)
    unseen = frozenset(value for value, nbytes in enumerate(sizes) if not nbytes)
    return HeldProblem(value_bytes=tuple(sizes), ops=tuple(ops), reads=frozenset(reads), unseen=unseen)


def cuts(program: Program, first: int, last: int, active: Collection[int], *, exact: bool) -> list[int]:
    """Returns where to cut units [first, last) into segments, both ends included.

    At narrow waists, and around scans that carry a derivative: each of those is a segment of its own.

    Args:
        program: the program. first, last: the units. active: its values that carry a derivative.
        exact: only where gradients keep their bits.
    """
    units = program.units[first:last]
    ops = [Op(inputs=u.inputs, outputs=u.outputs, seconds=0.0) for u in units]
    sizes = [program.nbytes(v) for v in range(len(program.avals))]
    loops = {p for u in units if is_loop(program, u.index, active) for p in (u.index, u.index + 1)}
    best: list[int] = []
    for reach in _REACHES:
        found = waists(ops, sizes, program.leaving(first, last), reach=reach)
        places = sorted({first, last, *loops, *(first + w for w in found)})
        kept = _keeping_sums(program, places, active) if exact else places
        if len(kept) == len(places):
            return kept
        best = max(best, kept, key=len)
    return best


def shares_sums(program: Program, first: int, middle: int, last: int, active: Collection[int]) -> bool:
    """Whether segments [first, middle) and [middle, last) run again as one would add up what others add one by one."""
    before = {v for u in program.units[first:middle] for v in u.inputs}
    behind = {v for u in program.units[middle:last] for v in u.inputs}
    return any(v in active and program.last_read[v] >= last for v in before & behind)


def _keeping_sums(program: Program, places: list[int], active: Collection[int]) -> list[int]:
    """Returns the places that leave the order of sums in backward as it is, so that gradients keep their bits.

    The cotangent of a value is summed from its last use to its first. A segment hands on the sum of its own uses: the
    same, unless it has several of a value that is used again behind it.
    """
    found = places[:1]
    for place in places[1:]:
        uses = collections.Counter(
            o
            for u in program.units[found[-1] : place]
            for o in u.operands
            if isinstance(o, int) and o in active and program.maker.get(o, -1) < found[-1]
        )
        if place == places[-1] or all(n < 2 or program.last_read[v] < place for v, n in uses.items()):
            found.append(place)
    return found


def is_loop(program: Program, unit: int, active: Collection[int]) -> bool:
    """Whether a unit is a scan over more than one step, or a `shard_map`, that carries a derivative."""
    found = program.units[unit]
    is_one = found.num_steps > 1 or found.kind == "shard_map"
    return is_one and any(v in active for v in found.outputs)


def may_run_again(program: Program, first: int, last: int) -> bool:
    """Whether units [first, last) may lie in a checkpoint: not where they have effects."""
    return not any(has_effects(unit.eqn) for unit in program.units[first:last])


def recomputed(program: Program, first: int, last: int, held: Held) -> Segment:
    """Returns the segment that holds what `held` says."""
    names = tuple(dict.fromkeys(program.name(v) for v in held.values))
    return Segment(first=first, last=last, recompute=True, held=names)


def ways(
    program: Program, first: int, last: int, active: Collection[int], costs: Costs, *, most: int
) -> list[tuple[Segment, ...]]:
    """Returns ways to run units [first, last), the plain one first; then those that trade bytes for time best.

    Args:
        program: the program. first, last: the units.
        active: its values that carry a derivative. costs: prices. most: how many of those at most.
    """
    found: list[tuple[Segment, ...]] = [(Segment(first=first, last=last),)]
    if not may_run_again(program, first, last):
        return found
    return found + [
        (recomputed(program, first, last, held),)
        for held in trade_offs(held_problem(program, first, last, active, costs), most=most)
    ]


def thinned(program: Program, places: list[int], active: Collection[int], *, exact: bool) -> list[list[int]]:
    """Returns coarser places to cut at: all, every second, every fourth, loops' ends kept.

    Args:
        program: the program. places: as `cuts` returns them. active: values that carry a derivative.
        exact: only those that leave gradients their bits.
    """
    loops = {p for u in program.units if is_loop(program, u.index, active) for p in (u.index, u.index + 1)}
    found = []
    for stride in _STRIDES:
        kept = [p for i, p in enumerate(places) if i % stride == 0 or p in loops or p == places[-1]]
        if not exact or _keeping_sums(program, kept, active) == kept:
            found.append(kept)
    return [f for i, f in enumerate(found) if f not in found[:i]]


def uniform(
    program: Program, places: Sequence[int], active: Collection[int], costs: Costs, *, most: int
) -> list[tuple[Segment, ...]]:
    """Returns layouts with one price per held byte throughout, most bytes first.

    Each holds what is cheapest at the price of a corner of the whole program's hull.
    """
    num_units = len(program.units)
    corners = hull(held_problem(program, 0, num_units, active, costs), most=most)
    prices = [(b.seconds - a.seconds) / (a.nbytes - b.nbytes) for a, b in itertools.pairwise(corners)]
    prices.append(2 * (prices[-1] if prices else 1.0))
    problems = [
        held_problem(program, first, last, active, costs) if may_run_again(program, first, last) else None
        for first, last in itertools.pairwise(places)
    ]

    def layout(price: float) -> tuple[Segment, ...]:
        found = []
        for (first, last), problem in zip(itertools.pairwise(places), problems, strict=True):
            held = cheapest(problem, price) if problem is not None else None
            plain = Segment(first=first, last=last)
            found.append(plain if held is None else recomputed(program, first, last, held))
        return tuple(found)

    return list(dict.fromkeys(map(layout, prices)))


def holding_everything(program: Program) -> Segment:
    """Returns the whole program as one segment that holds all that backward reads: JAX drops what it can do without."""
    return Segment(first=0, last=len(program.units), recompute=True, held=(EVERYTHING,))
