"""The solver's problem of a step: segments in a line, each with the prices of the ways to run it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable
from typing import Any

from recoup.jax._jax import Literal, scan_counts
from recoup.jax.cost import Costs
from recoup.jax.flops import sub_jaxprs
from recoup.jax.labels import cuts, is_loop, may_run_again, shares_sums, ways
from recoup.jax.layout import Segment
from recoup.jax.linear import is_differentiable
from recoup.jax.loops import body_ways, chunk_sizes, split_scan, whole_scan
from recoup.jax.pricing import Price, price
from recoup.jax.program import Program
from recoup.jax.trace import Step, active_values
from recoup.solver.problem import Block, Leaf, Option, Problem, Region
from recoup.solver.sequence import Pick
from recoup.solver.ways import Run, RungOf
from recoup.thresholds import MOST_POINTS

_Way = tuple[Segment, Price]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Line:
    """The problem, and for each of its leaves the ways behind its options."""

    problem: Problem
    ways: tuple[tuple[_Way, ...], ...]

    def layout(self, choice: tuple[Pick, ...], start: int = 0) -> tuple[Segment, ...]:
        """Returns the segments that the solver's choice says."""
        found = []
        for pick in choice:
            first, last = start + pick.first, start + pick.last
            if not isinstance(pick.way, Run):
                parts = self.layout(pick.inner, first)
                is_plain = all(not p.recompute and not p.scans for p in parts)
                whole = Segment(first=self.ways[first][0][0].first, last=self.ways[last - 1][0][0].last, recompute=True)
                found.append(whole if is_plain else dataclasses.replace(whole, parts=parts))
            else:
                found.append(self.ways[first][pick.way.rung.number if pick.way.rung else 0][0])
        return tuple(found)


class Options:
    """Prices the ways to run each segment of a step, equal segments once.

    Args:
        step: traced. costs: seconds of equations. exact: only ways that leave gradients their bits.
        offload: whether what is held may be held in host memory.
    """

    def __init__(self, step: Step, costs: Costs, *, exact: bool, offload: bool = False) -> None:
        self._step, self._costs, self._exact, self._offload = step, costs, exact, offload
        self._program = step.program
        self._there = {*step.program.inputs, *(v for v, _ in step.program.consts)}
        self._known: dict[Hashable, list[_Way]] = {}

    def line(self, fixed_bytes: int) -> Line:
        """Returns the solver's problem.

        Args:
            fixed_bytes: there all the time.
        """
        program, active = self._program, self._step.active
        places = cuts(program, 0, len(program.units), active, exact=self._exact)
        all_ways: list[tuple[_Way, ...]] = []
        blocks: list[Block] = []
        plain_seconds = plain_flops = 0.0
        behind: set[int] = set()
        begin = 0
        for index, (first, last) in enumerate(itertools.pairwise(places)):
            found = self._ways(first, last)
            all_ways.append(tuple(found))
            plain = found[0][1]
            plain_seconds += plain.seconds
            plain_flops += plain.flops
            options = tuple(
                Option(
                    ambient="save",
                    rung=RungOf(ladder=0, number=i) if i else None,
                    saved_bytes=p.saved_bytes,
                    forward_bytes=p.forward_bytes,
                    backward_bytes=p.backward_bytes,
                    extra_seconds=p.seconds - plain.seconds,
                    extra_flops=int(p.flops - plain.flops),
                )
                for i, (_, p) in enumerate(found)
            )
            leaf = Leaf(owner=(str(index), 0), options=options)
            entering = set(program.entering(first, last)) - self._there
            region = None
            if may_run_again(program, first, last):
                region = Region(
                    saved_bytes=sum(program.nbytes(v) for v in entering),
                    forward_bytes=plain.forward_bytes,
                    replay_bytes=plain.incoming_bytes,
                    seconds=sum(self._costs.seconds(u.eqn) for u in program.units[first:last]),
                    flops=program.flops(first, last),
                )
            chained = bool(blocks) and entering <= behind
            if chained and self._exact:
                chained = not shares_sums(program, begin, first, last, active)
            blocks.append(Block(path=str(index), call=0, kind="segment", parts=(leaf,), region=region, chained=chained))
            begin = first
            behind = entering | {v for u in program.units[first:last] for v in u.outputs}
        problem = Problem(
            parts=tuple(blocks),
            fixed_bytes=fixed_bytes,
            optimizer_peak_bytes=0,
            plain_seconds=plain_seconds,
            plain_flops=int(plain_flops),
        )
        return Line(problem=problem, ways=tuple(all_ways))

    def _price(self, segment: Segment) -> Price:
        return price(self._program, (segment,), self._step.active, self._there, self._costs)

    def _ways(self, first: int, last: int) -> list[_Way]:
        program, active = self._program, self._step.active
        if last == first + 1 and is_loop(program, first, active):
            return self._loop_ways(first)
        segments = [way for (way,) in ways(program, first, last, active, self._costs, most=MOST_POINTS // 2)]
        if self._offload:
            segments += [offloaded(way) for way in segments if way.held]
        key = self._structure(first, last)
        prices = self._known.get(key)
        if prices is None:
            prices = self._known[key] = [(s, self._price(s)) for s in segments]
        return [(s, p) for s, (_, p) in zip(segments, prices, strict=True)]

    def _loop_ways(self, unit: int) -> list[_Way]:
        """Returns ways to run a scan: body layouts, chunks of steps, and two stretches of steps."""
        program, found = self._program, self._program.units[unit]
        body, num_steps = program.bodies[unit], found.num_steps
        active = body_active(program, unit, self._step.active)
        plain = Segment(first=unit, last=unit + 1)
        result = [(plain, self._price(plain))]
        if not may_run_again(body, 0, len(body.units)):
            return result
        layouts = body_ways(body, active, self._costs, exact=self._exact)
        if self._offload:
            layouts += [tuple(map(offloaded, found)) for found in layouts if any(segment.held for segment in found)]
        whole = [whole_scan(unit, num_steps, layout) for layout in layouts[1:]]
        result += [(s, self._price(s)) for s in whole]
        if found.kind == "shard_map":
            return result
        hull = _pareto(result)
        if self._exact and any(v in active for v in body.inputs[: scan_counts(found.eqn)[0]]):
            return result  # what all steps read has a gradient: a sum over steps, in another order in two stretches
        lean = {layouts[0], hull[-1][0].scans[0].pieces[0].body if hull[-1][0].scans else layouts[0]}
        for chunk in chunk_sizes(num_steps):
            chunked = [whole_scan(unit, num_steps, layout, chunk) for layout in layouts if layout in lean]
            result += [(s, self._price(s)) for s in chunked]
        stride = max(num_steps // MOST_POINTS, 1)
        plain_whole = whole_scan(unit, num_steps, layouts[0])
        for (left, of_left), (right, of_right) in itertools.pairwise(hull):
            left = left if left.scans else plain_whole
            for steps in range(stride, num_steps, stride):
                split = split_scan(unit, num_steps, num_steps - steps, right, left)
                result.append((split, self._mixed(of_right, of_left, (num_steps - steps) / num_steps, unit)))
        return result

    def _mixed(self, first: Price, second: Price, share: float, unit: int) -> Price:
        """Returns the price of a scan in two stretches; its stacked operands are copied, in part each."""
        found = self._program.units[unit]
        num_consts, num_carry = scan_counts(found.eqn)
        stacked = sum(self._program.nbytes(o) for o in found.operands[num_consts + num_carry :] if isinstance(o, int))
        saved = int(first.saved_bytes * share + second.saved_bytes * (1 - share)) + stacked
        return Price(
            saved_bytes=saved,
            forward_bytes=saved + max(p.forward_bytes - p.saved_bytes for p in (first, second)),
            backward_bytes=saved + max(p.backward_bytes - p.saved_bytes for p in (first, second)),
            incoming_bytes=first.incoming_bytes,
            seconds=first.seconds * share + second.seconds * (1 - share),
            flops=int(first.flops * share + second.flops * (1 - share)),
        )

    def _structure(self, first: int, last: int) -> Hashable:
        """Returns a key that is equal for segments whose ways cost the same."""
        program = self._program
        numbers: dict[int, int] = {}

        def number(value: int) -> int:
            return int(numbers.setdefault(value, len(numbers)))

        key: list[Hashable] = []
        for unit in program.units[first:last]:
            operands = tuple(
                (number(o), o in self._step.active, o in self._there) if isinstance(o, int) else str(o)
                for o in unit.operands
            )
            key.append((unit.kind, _parameters(unit.eqn), operands, tuple(number(v) for v in unit.outputs)))
        shapes = tuple((n, str(program.avals[v])) for v, n in numbers.items())
        return tuple(key), shapes, tuple(numbers.get(v) for v in program.leaving(first, last))


def offloaded(segment: Segment) -> Segment:
    """Returns the segment with its held values in host memory."""
    return dataclasses.replace(segment, offloaded=segment.held)


def _parameters(eqn: Any) -> Hashable:
    if next(sub_jaxprs(eqn), None) is not None:
        return tuple(str(j) for j in sub_jaxprs(eqn))
    return tuple(sorted((k, str(v)) for k, v in eqn.params.items() if not callable(v)))


def body_active(program: Program, unit: int, active: Any) -> frozenset[int]:
    """Returns the values of a scan's body that carry a derivative."""
    found, body = program.units[unit], program.bodies[unit]
    carrying = {i for i, o in enumerate(found.operands) if isinstance(o, int) and o in active}
    num_consts, num_carry = scan_counts(found.eqn)
    while True:  # what a step hands on may carry a derivative though its first value does not
        inside = active_values(body, [body.inputs[i] for i in carrying], body.outputs)
        handed = body.outputs[:num_carry]
        more = {
            num_consts + i
            for i, o in enumerate(handed)
            if not isinstance(o, Literal) and o in inside and is_differentiable(body.avals[body.inputs[num_consts + i]])
        }
        if more <= carrying:
            return inside
        carrying |= more


def _pareto(found: list[_Way]) -> list[_Way]:
    """Returns the ways that none beats in both saved bytes and time, most bytes first."""
    kept: list[_Way] = []
    for way in sorted(found, key=lambda w: (w[1].saved_bytes, w[1].seconds)):
        if not kept or way[1].seconds < kept[-1][1].seconds:
            kept.append(way)
    return kept[::-1]
