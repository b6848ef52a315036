"""The problem laid out: leaves in a line, and over them the calls that may become regions.

Blocks that are no region are their parts inlined, so a choice is a walk over the line: single leaves, each with one
of its options, and jumps over calls that are regions. A `Pick` is one such step. Its offsets are relative to the
region around it, so that calls of equal structure share their inner choices.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Hashable, Iterator, Sequence

from recoup.solver.disjoint_sets import DisjointSets
from recoup.solver.problem import Block, Keep, Leaf, Offload, Problem, Region
from recoup.solver.ways import Move, Replay, Run, Way

# A group that reaches further (a residual stream) would leave no choice at all; its leaves choose on their own.
LONGEST_GROUP_LEAVES = 24


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """One step of a choice: leaves [first, last), counted from the start of the region around it.

    Attributes:
        way: how a leaf runs, or what a region, or a call whose saved tensors are moved, does; the leaves inside those
            run as `inner` says.
        rank: for a region, which of the calls that begin at `first`: 0 is the innermost.
        num_calls: for a region, how many calls it covers; more than one is a span.
    """

    first: int
    last: int
    way: Way
    inner: tuple[Pick, ...] = ()
    rank: int = 0
    num_calls: int = 0


Choice = tuple[Pick, ...]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A block that holds leaves, where it lies in the line.

    Attributes:
        first, last: its leaves.
        starts: the leaf at which each part begins.
        rank: how many calls inside it begin at the same leaf.
        structure: equal for calls with the same numbers inside.
        units: those that are inside this call but in none of its parts alone.
        open_units: those with some leaves inside this call and some outside.
        following: the next sibling, if it is chained and both may be regions: the two may form one span.
    """

    block: Block
    parts: tuple[Leaf | Call, ...]
    starts: tuple[int, ...]
    first: int
    last: int
    rank: int
    structure: int
    units: tuple[int, ...]
    open_units: tuple[int, ...]
    following: Call | None = None


class Line:
    """A problem laid out.

    Attributes:
        root: the whole step as a call that is no region.
        leaves: in forward order.
        units: leaves that take one action together, as positions in order: those of one owner (the engine sets an
            action per call) and those of one group (they rederive from what each other keep).
        unit_of: for each leaf its unit, -1 where it is on its own.
        gradient_sums: gradient bytes of leaves [0, i), so that those of a stretch are one subtraction.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.leaves = tuple(_leaves(problem.parts))
        self.units = _units(self.leaves)
        self.unit_of = [-1] * len(self.leaves)
        for unit, positions in enumerate(self.units):
            for position in positions:
                self.unit_of[position] = unit
        self.gradient_sums = [0]
        for leaf in self.leaves:
            self.gradient_sums.append(self.gradient_sums[-1] + leaf.gradient_bytes)
        self._structures: dict[Hashable, int] = {}
        self._starting: dict[int, list[Call]] = {}
        step = Block(path="", call=0, kind="step", parts=problem.parts, region=None)
        self.root = self._lay(step, 0)

    def calls(self, first: int, rank: int, num_calls: int) -> tuple[Call, ...]:
        """Returns the calls of a region that begins at leaf `first` of the line."""
        found = [self._starting[first][rank]]
        while len(found) < num_calls:
            following = found[-1].following
            assert following is not None, "a span runs over calls that are chained"
            found.append(following)
        return tuple(found)

    def structure(self, numbers: Hashable) -> int:
        """Returns a number that stands for `numbers`: the same for equal ones."""
        return self._structures.setdefault(numbers, len(self._structures))

    def is_touched(self, unit: int, first: int, last: int) -> bool:
        """Whether a leaf of the unit lies in [first, last)."""
        positions = self.units[unit]
        return bisect.bisect_left(positions, first) < bisect.bisect_left(positions, last)

    def _lay(self, block: Block, first: int) -> Call:
        parts: list[Leaf | Call] = []
        starts: list[int] = []
        numbers: list[Hashable] = []
        names: dict[int, int] = {}  # units by order of appearance: part of the structure, unlike their numbers
        at = first
        starting = self._starting.setdefault(first, [])
        for part in block.parts:
            if isinstance(part, Leaf):
                parts.append(part)
                starts.append(at)
                unit = self.unit_of[at]
                name = names.setdefault(unit, len(names)) if unit >= 0 else -1
                numbers.append((part.options, part.gradient_bytes, name))
                at += 1
                continue
            inside = self._lay(part, at)
            if not inside.parts:
                continue
            previous = parts[-1] if parts else None
            if isinstance(previous, Call) and part.chained and part.region and previous.block.region:
                previous.following = inside
            parts.append(inside)
            starts.append(at)
            numbers.append((inside.structure, tuple(names.setdefault(u, len(names)) for u in inside.open_units)))
            at = inside.last
        units = self.units
        open_units = tuple(u for u in names if units[u][0] < first or units[u][-1] >= at)
        call = Call(
            block=block,
            parts=tuple(parts),
            starts=tuple(starts),
            first=first,
            last=at,
            rank=len(starting),
            structure=self.structure(
                (tuple(numbers), tuple(names[u] for u in open_units), block.region, block.chained, block.offloads)
            ),
            units=tuple(u for u in names if u not in open_units),
            open_units=open_units,
        )
        if parts:
            starting.append(call)
        return call


def _leaves(parts: Sequence[Leaf | Block]) -> Iterator[Leaf]:
    for part in parts:
        if isinstance(part, Leaf):
            yield part
        else:
            yield from _leaves(part.parts)


def _units(leaves: Sequence[Leaf]) -> list[list[int]]:
    """Returns the units of leaves: those with a choice that share an owner or a group, two at least."""
    free = [i for i, leaf in enumerate(leaves) if len({o.ambient for o in leaf.options}) > 1]
    ends: dict[int, tuple[int, int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.group >= 0:
            ends[leaf.group] = (ends.get(leaf.group, (i, i))[0], i)
    longest = max(LONGEST_GROUP_LEAVES, len(leaves) // 8)
    sets = DisjointSets(len(leaves))
    seen: dict[Hashable, int] = {}
    for i in free:
        leaf = leaves[i]
        keys: list[Hashable] = [leaf.owner]
        if leaf.group >= 0 and ends[leaf.group][1] - ends[leaf.group][0] < longest:
            keys.append(leaf.group)
        for key in keys:
            sets.join(i, seen.setdefault(key, i))
    gathered: dict[int, list[int]] = {}
    for i in free:
        gathered.setdefault(sets.find(i), []).append(i)
    return [positions for positions in gathered.values() if len(positions) > 1]


class Span:
    """The price of one region over consecutive calls, which are added one by one.

    What it saves are the first call's inputs. `replay_bytes` has two sides: incoming gradients are the last call's;
    inputs that the replay counts again (negative) are the first call's. Its replay stops in the last call.
    """

    __slots__ = ("_first", "_flops", "_forward_bytes", "_keeps", "_last", "_seconds")

    def __init__(self) -> None:
        self._keeps: dict[tuple[str, ...], Keep] = {}
        self._first: Region | None = None
        self._last: Region | None = None
        self._forward_bytes = 0
        self._seconds = 0.0
        self._flops = 0

    def add(self, region: Region) -> None:
        """Appends a call."""
        if self._last is not None:
            self._seconds += self._last.tail_seconds - region.entry_seconds
            self._flops += self._last.tail_flops
        self._keeps = _joined(self._keeps, region.keeps) if self._first is not None else _named(region.keeps)
        self._first = self._first or region
        self._last = region
        self._forward_bytes = max(self._forward_bytes, region.forward_bytes)
        self._seconds += region.seconds
        self._flops += region.flops

    @property
    def is_allowed(self) -> bool:
        """Whether the calls added so far may form one region."""
        first, last = self._first, self._last
        return first is not None and first.begins and (first is not last or first.is_alone)

    def region(self) -> Region:
        """Returns the price of the region over the calls added so far, at least one."""
        first, last = self._first, self._last
        assert first is not None and last is not None
        return Region(
            saved_bytes=first.saved_bytes,
            forward_bytes=self._forward_bytes,
            replay_bytes=min(first.replay_bytes, 0) + max(last.replay_bytes, 0),
            seconds=self._seconds,
            flops=self._flops,
            entry_seconds=first.entry_seconds,
            tail_seconds=last.tail_seconds,
            tail_flops=last.tail_flops,
            is_alone=self.is_allowed,
            begins=first.begins,
            offload_seconds=first.offload_seconds,
            keeps=tuple(self._keeps.values()),
        )


@dataclasses.dataclass(kw_only=True, eq=False)
class PricedSpan:
    """A region over consecutive calls: how many leaves they have, and its price with nothing kept or moved."""

    num_leaves: int
    plain: Region

    @functools.cached_property
    def prices(self) -> tuple[tuple[Replay, Region], ...]:
        """Its price for each way to run it, the plain one first."""
        ways = [Replay()]
        if self.plain.offload_seconds is not None:
            ways.append(Replay(offload=True))
        ways += [Replay(keep=keep.labels) for keep in self.plain.keeps]
        return tuple((way, region_in(self.plain, way)) for way in ways)


def spans_over(calls: Sequence[Call], lengths: Sequence[int]) -> dict[int, PricedSpan | None]:
    """Returns the regions over the first calls of some, which all have a price as one, by their number.

    Args:
        lengths: how many calls, in order; None where those may not be one region.
    """
    span, at = Span(), 0
    found: dict[int, PricedSpan | None] = {}
    for length in lengths:
        for call in calls[at:length]:
            assert call.block.region is not None, "a span runs over calls that may be regions"
            span.add(call.block.region)
        at = length
        num_leaves = calls[length - 1].last - calls[0].first
        found[length] = PricedSpan(num_leaves=num_leaves, plain=span.region()) if span.is_allowed else None
    return found


def _named(keeps: Sequence[Keep]) -> dict[tuple[str, ...], Keep]:
    return {keep.labels: keep for keep in keeps}


def _joined(before: dict[tuple[str, ...], Keep], keeps: Sequence[Keep]) -> dict[tuple[str, ...], Keep]:
    """Returns the ops that consecutive calls keep together: all calls of a span keep the same ops."""
    after = _named(keeps)
    found = {}
    for labels, a in before.items():
        b = after.get(labels)
        if b is not None:
            found[labels] = Keep(
                labels=labels,
                nbytes=a.nbytes + b.nbytes,
                saved_inside_bytes=a.saved_inside_bytes + b.saved_inside_bytes,
                seconds=a.seconds + b.seconds,
                flops=a.flops + b.flops,
            )
    return found


def combine(regions: Sequence[Region]) -> Region:
    """Returns the price of one region over consecutive calls."""
    span = Span()
    for region in regions:
        span.add(region)
    return span.region()


def region_of(calls: tuple[Call, ...]) -> Region:
    """Returns the price of one region over `calls`, which all may be one."""
    regions = [call.block.region for call in calls if call.block.region is not None]
    assert len(regions) == len(calls), "a region was chosen where none may be"
    return combine(regions)


def results_kept(region: Region, keep: Keep) -> Region:
    """Returns the price of a region that keeps some results: held from its forward on, and not run again."""
    return dataclasses.replace(
        region,
        saved_bytes=region.saved_bytes + keep.nbytes,
        forward_bytes=region.forward_bytes + keep.nbytes,
        replay_bytes=region.replay_bytes - keep.saved_inside_bytes,
        seconds=region.seconds - keep.seconds,
        flops=region.flops - keep.flops,
    )


def inputs_moved(region: Region) -> Region:
    """Returns the price of a region whose inputs go to the host: there in its forward and in its replay only."""
    assert region.offload_seconds is not None
    return dataclasses.replace(
        region,
        saved_bytes=0,
        replay_bytes=region.replay_bytes + region.saved_bytes,
        seconds=region.seconds + region.offload_seconds,
    )


def region_in(region: Region, way: Replay) -> Region:
    """Returns the price of a region that keeps or moves what `way` says."""
    if way.keep:
        return results_kept(region, next(keep for keep in region.keeps if keep.labels == way.keep))
    return inputs_moved(region) if way.offload else region


def saves_moved(offload: Offload) -> Region:
    """Returns the price of a call whose saved tensors go to the host, as that of a region whose replay is a copy."""
    return Region(
        saved_bytes=offload.saved_bytes,
        forward_bytes=offload.forward_bytes,
        replay_bytes=-offload.saved_bytes,
        seconds=offload.seconds,
        flops=0,
    )


def price_of(line: Line, pick: Pick, start: int) -> Region | None:
    """Returns the price of a pick that is a region or that moves something to the host; None for a leaf's option.

    Args:
        start: where the choice that the pick is part of begins.
    """
    way = pick.way
    if isinstance(way, Run):
        return None
    calls = line.calls(start + pick.first, pick.rank, pick.num_calls)
    if isinstance(way, Move):
        return saves_moved(next(o for o in calls[0].block.offloads if o.inside == way.inside))
    return region_in(region_of(calls), way)
