"""From priced traces to the solver's problem.

Every ambient action (`save`, `rederive`) was captured once as a step of its own, so an option's prices are measured on
a timeline, never estimated: the bytes that a leaf leaves saved, its peaks in forward and backward above the level at
its start, and the seconds of rebuilds. A storage that several leaves save is charged to the first. Aliases between
decisions, which the additive model cannot express, are corrected by simulating the applied plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from recoup.cost.host_overhead import noticed_ops
from recoup.cost.model import PricedTrace
from recoup.ir.decision import Ambient
from recoup.ir.trace import Call, Trace
from recoup.solver.intervals import Interval, paths_of, segments_of
from recoup.solver.problem import Block, Leaf, Option, Problem, Region
from recoup.solver.rederive_groups import Rederivation, input_holders
from recoup.solver.scans import Ladder, those_under, with_rungs
from recoup.solver.selective_save import keeps_of

_Array = npt.NDArray[np.int64]
_FEMTOSECONDS = 1e15  # in a second: whole numbers of them add up alike in any order


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Numbers of one captured variant, by segment."""

    fixed_bytes: int
    saved: _Array
    saved_before: _Array
    gradient: _Array
    gradient_after: _Array
    forward: _Array
    backward: _Array
    extra_seconds: list[float]
    extra_flops: list[int]
    levels: _Array


def build_problem(
    variants: Mapping[Ambient, PricedTrace],
    *,
    spans: bool = True,
    rebuilds_inputs: bool = True,
    ladders: Sequence[Ladder] = (),
) -> Problem:
    """Returns the problem.

    Args:
        variants: the priced trace of the plain step under "save", and under "rederive" that of the step in which
            everything is rederived, if that action may be chosen.
        rebuilds_inputs: count a region's input as free where it is rederived when everything is; that fails if what
            it is rebuilt from lies in another region.
        spans: whether calls that hand one tensor on may form one region.
        ladders: of scans that the traces hold with all their steps taped.
    """
    plain = variants["save"]
    trace = plain.trace
    segments = segments_of(trace)
    base = measure(plain, segments)
    numbers: dict[Ambient, Numbers] = {"save": base}
    free: set[int] = set()
    groups: dict[int, int] = {}
    sharing: set[int] = set()
    if "rederive" in variants:
        other = variants["rederive"]
        own = segments_of(other.trace)
        if [s.call for s in own] == [s.call for s in segments] and paths_of(trace) == paths_of(other.trace):
            rederivation = Rederivation(trace, other.trace, segments, own)
            numbers["rederive"] = measure(other, own, charges=rederivation.charges())
            groups, sharing = rederivation.groups(), rederivation.sharing()
            free = rederivation.dropped() if rebuilds_inputs else free
    children: dict[int, list[int]] = {}
    for index, call in enumerate(trace.calls):
        children.setdefault(call.parent, []).append(index)
    by_call: dict[int, list[int]] = {}
    for position, segment in enumerate(segments):
        by_call.setdefault(segment.call, []).append(position)
    holders = input_holders(trace)
    lookup = _Lookup(plain, segments)

    def leaf(position: int, owner: tuple[str, int]) -> Leaf:
        options = []
        for action, n in numbers.items():
            options.append(
                Option(
                    ambient=action,
                    saved_bytes=int(n.saved[position]),
                    forward_bytes=int(n.forward[position]),
                    backward_bytes=int(n.backward[position]),
                    extra_seconds=n.extra_seconds[position],
                    extra_flops=n.extra_flops[position],
                )
            )
        is_same = len(options) == 2 and dataclasses.replace(options[1], ambient="save") == options[0]
        if is_same and position not in sharing:  # what others free may hang on it
            options = options[:1]
        first, last = segments[position].first, segments[position].last
        for which, ladder in enumerate(ladders):
            if any(first <= op < last for op in ladder.first_ops):
                options = list(with_rungs(options, ladders, which))
        return Leaf(
            owner=owner,
            options=tuple(options),
            gradient_bytes=int(base.gradient[position]),
            group=groups.get(position, -1),
        )

    def block(index: int) -> Block:
        call = trace.calls[index]
        return Block(
            path=call.path,
            call=call.index,
            kind=call.kind,
            parts=parts(index, (call.path, call.index)),
            region=_region(lookup, base, index, free, holders) if call.path and not call.runs_once else None,
            chained=call.chained and spans,
        )

    def parts(index: int, owner: tuple[str, int]) -> tuple[Leaf | Block, ...]:
        found: list[tuple[int, int, Leaf | Block]] = []
        for child in children.get(index, ()):
            call = trace.calls[child]
            if call.last_op > call.first_op:
                found.append((call.first_op, 1, block(child)))
        for position in by_call.get(index, ()):
            found.append((segments[position].first, 0, leaf(position, owner)))
        found.sort(key=lambda item: item[:2])
        return tuple(part for _, _, part in found)

    num_forward = trace.num_forward_ops
    optimizer = [i for i, o in enumerate(trace.ops) if o.phase == "optimizer"]
    levels = base.levels
    return Problem(
        parts=parts(-1, ("", 0)),
        fixed_bytes=base.fixed_bytes,
        optimizer_peak_bytes=int(levels[optimizer].max()) if optimizer else 0,
        plain_seconds=float(sum(plain.op_seconds)),
        plain_flops=int(sum(trace.signatures[o.signature].flops for o in trace.ops)) if num_forward else 0,
    )


def measure(priced: PricedTrace, segments: Sequence[Interval], *, charges: Mapping[int, int] | None = None) -> Numbers:
    """Returns a captured step's numbers for each interval of its forward, backward's share included.

    Args:
        charges: the intervals that some saved storages count for; the others count for the first that saves them.
    """
    trace = priced.trace
    levels = np.asarray(trace.levels(priced.op_workspace_bytes), dtype=np.int64)
    num = len(segments)
    segment_of_op = np.full(len(trace.ops) + 1, -1, dtype=np.int64)
    for position, segment in enumerate(segments):
        segment_of_op[segment.first : segment.last] = position
    num_forward = segments[-1].last if segments else 0
    for i in range(num_forward, len(trace.ops)):
        op = trace.ops[i]
        if op.phase == "backward" and op.origin >= 0:
            segment_of_op[i] = segment_of_op[op.origin]
    saved = np.zeros(num, dtype=np.int64)
    gradient = np.zeros(num, dtype=np.int64)
    fixed = 0
    charges = charges or {}
    for index, storage in enumerate(trace.storages):
        if storage.alloc_op < 0:
            fixed += storage.nbytes
        elif storage.category == "saved" and storage.free_op >= trace.num_forward_ops:
            at = charges.get(index, int(segment_of_op[min(storage.saved_op, num_forward - 1)]))
            saved[at] += storage.nbytes
        elif storage.category == "gradient":
            at = segment_of_op[storage.alloc_op]
            if at >= 0:
                gradient[at] += storage.nbytes
    saved_before = np.concatenate([[0], np.cumsum(saved)[:-1]]) if num else saved
    gradient_after = gradient.sum() - np.cumsum(gradient)
    forward = np.zeros(num, dtype=np.int64)
    backward = saved.copy()
    seconds = [0.0] * num
    flops = [0] * num
    costs = priced.serial_costs
    for i, op in enumerate(trace.ops):
        at = int(segment_of_op[i])
        if at < 0:
            continue
        if op.phase == "backward":
            above = levels[i] - fixed - saved_before[at] - gradient_after[at]
            backward[at] = max(backward[at], above)
            if op.replayed:
                seconds[at] += priced.op_seconds[i]
                if not trace.signatures[op.signature].is_view:
                    seconds[at] += costs.replayed_op_seconds
                flops[at] += trace.signatures[op.signature].flops
        else:
            forward[at] = max(forward[at], levels[i] - fixed - saved_before[at])
    if num:
        for i, _sources in trace.rederive_links:
            seconds[segment_of_op[min(i, num_forward - 1)]] += costs.rederived_tensor_seconds
    return Numbers(
        fixed_bytes=fixed,
        saved=saved,
        saved_before=saved_before,
        gradient=gradient,
        gradient_after=gradient_after,
        forward=forward,
        backward=backward,
        extra_seconds=seconds,
        extra_flops=flops,
        levels=levels,
    )


class _Lookup:
    """Sums over ranges of ops, and forward storages by the op that made them, computed once."""

    def __init__(self, priced: PricedTrace, segments: Sequence[Interval]) -> None:
        trace = priced.trace
        self.trace = trace
        self.segment_starts = [s.first for s in segments]
        flops = [trace.signatures[o.signature].flops for o in trace.ops]
        # Whole femtoseconds: equal layers get equal sums wherever they lie, which the solver's sharing lives on.
        whole = np.rint(np.asarray(priced.op_seconds) * _FEMTOSECONDS).astype(np.int64)
        self._sums = np.concatenate([[0], np.cumsum(whole)])
        self.costs = priced.serial_costs
        ran = [not trace.signatures[o.signature].is_view for o in trace.ops]
        self._num_ran = np.concatenate([[0], np.cumsum(np.asarray(ran, dtype=np.int64))])
        self._num_noticed = np.concatenate([[0], np.cumsum(np.asarray(noticed_ops(trace), dtype=np.int64))])
        begun = [c.first_op for c in trace.calls if c.path and c.last_op > c.first_op]
        self._call_starts = np.sort(np.asarray(begun, dtype=np.int64))
        self.flops = np.concatenate([[0], np.cumsum(np.asarray(flops, dtype=np.int64))])
        made = [s for s in trace.storages if s.alloc_op >= 0 and s.nbytes and s.released_op < s.free_op]
        made.sort(key=lambda s: s.alloc_op)
        self.made_at = np.asarray([s.alloc_op for s in made], dtype=np.int64)
        self.released = np.asarray([s.released_op for s in made], dtype=np.int64)
        self.freed = np.asarray([s.free_op for s in made], dtype=np.int64)
        self.nbytes = np.asarray([s.nbytes for s in made], dtype=np.int64)

    def seconds(self, first: int, last: int) -> float:
        """Returns how long ops [first, last) take."""
        return float(self._sums[last] - self._sums[first]) / _FEMTOSECONDS

    def replay_seconds(self, first: int, last: int) -> float:
        """Returns how long ops [first, last) take when they run again, and the calls that begin with them."""
        num_ops = int(self._num_noticed[last] - self._num_noticed[first])
        begin, end = np.searchsorted(self._call_starts, [first, last])
        return self.seconds(first, last) + self.costs.replay_seconds(num_ops=num_ops, num_calls=int(end - begin))

    def keep_seconds(self, first: int, last: int) -> float:
        """Returns the seconds of watching ops [first, last) for results to keep."""
        return int(self._num_ran[last] - self._num_ran[first]) * self.costs.watched_op_seconds

    def let_go(self, first: int, last: int) -> _Array:
        """Returns for each op of [first, last) the bytes made in that range that only autograd still holds."""
        low, high = np.searchsorted(self.made_at, [first, last])
        start = np.clip(self.released[low:high] + 1, first, last) - first
        stop = np.clip(self.freed[low:high] + 1, first, last) - first
        change = np.zeros(last - first + 1, dtype=np.int64)
        np.add.at(change, start, self.nbytes[low:high])
        np.add.at(change, stop, -self.nbytes[low:high])
        return np.cumsum(change[:-1])


def _region(lookup: _Lookup, numbers: Numbers, index: int, free: set[int], holders: Mapping[int, list[int]]) -> Region:
    trace = lookup.trace
    call = trace.calls[index]
    first, last = call.first_op, call.last_op
    stop = max(call.replay_stop_op, first)
    pinned, saved_inside, rebuilding = 0, 0, 0.0
    for i in call.inputs:
        storage = trace.storages[i]
        if storage.alloc_op >= 0 and i in free:
            rebuilding += lookup.seconds(storage.alloc_op, storage.alloc_op + 1) + lookup.costs.rederived_tensor_seconds
            continue
        if storage.alloc_op < 0 or _held_before(trace, call, holders.get(i, ())):
            continue
        pinned += storage.nbytes
        if storage.category == "saved" and call.first_op <= storage.saved_op < call.last_op:
            saved_inside += storage.nbytes
    at = int(np.searchsorted(lookup.segment_starts, first))
    level = numbers.levels[first:last] - lookup.let_go(first, last)
    return Region(
        saved_bytes=pinned,
        forward_bytes=int(level.max()) - numbers.fixed_bytes - int(numbers.saved_before[at]),
        replay_bytes=-saved_inside,
        seconds=lookup.replay_seconds(first, stop) + rebuilding + lookup.costs.region_seconds,
        flops=int(lookup.flops[stop] - lookup.flops[first]),
        entry_seconds=rebuilding,
        tail_seconds=lookup.replay_seconds(stop, last),
        tail_flops=int(lookup.flops[last] - lookup.flops[stop]),
        # Otherwise its replay would run nothing: what it saves is its own input.
        is_alone=not all(trace.signatures[o.signature].is_view for o in trace.ops[first:stop]),
        begins=not call.refusal,
        keeps=keeps_of(trace, call, stop, lookup.seconds, overhead_seconds=lookup.keep_seconds(first, last)),
    )


def _held_before(trace: Trace, call: Call, holders: Sequence[int]) -> bool:
    """Whether an earlier call that has the same input holds it, whatever action that call takes."""
    return any(trace.calls[h].last_op <= call.first_op for h in holders)


def only(problem: Problem, action: Ambient) -> Problem:
    """Returns the problem in which every leaf that can runs under `action`; regions and scans are left to choose."""

    def narrow(part: Leaf | Block) -> Leaf | Block:
        if isinstance(part, Block):
            return dataclasses.replace(part, parts=tuple(narrow(p) for p in part.parts))
        return dataclasses.replace(part, options=those_under(part.options, action), group=-1)

    return dataclasses.replace(problem, parts=tuple(narrow(p) for p in problem.parts))
