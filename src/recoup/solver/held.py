"""Which values of a segment to hold, so that backward finds or rebuilds all it reads: a minimum cut for each price.

Backward reads some values of a segment. Each is either *held* from forward on, or *rebuilt*: the op that made it runs
again, from inputs that are held or rebuilt in turn. For a price per held byte the cheapest choice is a minimum cut:

    source -> a_v           no limit                backward reads v
    a_v -> r_o              price * bytes(v)        o made v; cut: v is held
    r_o -> sink             seconds(o)              cut: o runs again
    r_o -> a_u              no limit                u is an input of o that is not free

As the price rises, fewer bytes are held and more ops run again; the choices found are the corners of the lower convex
hull of (bytes, seconds), each exact for its bytes. Between two corners `trade_offs` goes value by value, each time the
one that is worth most for its bytes. The cut does not see what a rebuild has alive at once: callers simulate that.
Plain numbers; nothing of the framework whose step it is.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from recoup.solver.min_cut import FlowNetwork

_SOURCE, _SINK, _FIRST_NODE = range(3)


class Op(NamedTuple):
    """One op of a segment.

    Attributes:
        inputs, outputs: values, as indices into `Segment.value_bytes`. Each value has at most one maker.
        seconds: what running it again takes (any unit, the same for all).
        can_rerun: whether it may run again at all.
        draws: of its outputs those that it reads when it runs again, a dropout's mask: nothing makes them again.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float
    can_rerun: bool = True
    draws: tuple[int, ...] = ()

    @property
    def rerun_reads(self) -> tuple[int, ...]:
        """What it reads when it runs again."""
        return self.inputs + self.draws


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive ops of a forward pass.

    Attributes:
        value_bytes: of each value.
        ops: in forward order.
        reads: values that backward reads. Values that no op here makes are free: they are there anyway.
        unseen: values that cannot be held.
    """

    value_bytes: tuple[int, ...]
    ops: tuple[Op, ...]
    reads: frozenset[int]
    unseen: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A choice: the values held and the ops run again, in forward order, with their bytes and seconds."""

    values: tuple[int, ...]
    rerun: tuple[int, ...]
    nbytes: int
    seconds: float


class Cuts:
    """The minimum cuts of one segment: its graph is built once, a price only changes what holding a value costs.

    A node stands for ops that run again together, or for a value that several of them read. The rest of the graph
    described above changes no cut: ops that nothing read leads to, values that no cheapest choice holds.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._maker = {v: i for i, op in enumerate(segment.ops) for v in op.outputs}
        self._drawn = {v for op in segment.ops for v in op.draws}
        self._readers = self._readers_of()
        self._node_of = self._grouped()
        seconds: dict[int, float] = {}
        for i, node in self._node_of.items():
            seconds[node] = seconds.get(node, 0.0) + segment.ops[i].seconds
        several = [v for v, readers in self._readers.items() if len(readers) > 1 and v not in segment.reads]
        self._network = network = FlowNetwork(_FIRST_NODE + len(seconds) + len(several))
        node_of_value = {v: at for at, v in enumerate(several, start=_FIRST_NODE + len(seconds))}
        self._priced: list[tuple[int, int]] = []  # edges that a price is for, and its bytes
        num_edges = 0
        for value in sorted(segment.reads & self._maker.keys() | self._readers.keys()):
            nbytes = math.inf if value in segment.unseen else segment.value_bytes[value]
            made_by = self._made_again_by(value)
            tail, head = _SOURCE, _SINK if made_by is None else self._node_of[made_by]
            if value not in segment.reads:
                tail = node_of_value.get(value, self._node_of[self._readers[value][0]])
            if tail == head or not nbytes:
                continue
            if nbytes != math.inf:
                self._priced.append((num_edges, int(nbytes)))
            network.add_edge(tail, head, nbytes)
            num_edges += 1
            if value in node_of_value:
                for node in dict.fromkeys(self._node_of[i] for i in self._readers[value]):
                    network.add_edge(node, tail, math.inf)
                    num_edges += 1
        for node, took in seconds.items():
            network.add_edge(node, _SINK, took)

    def _made_again_by(self, value: int) -> int | None:
        """Returns the op that can make a value again, None if it has to be held where it is read."""
        made_by = None if value in self._drawn else self._maker[value]
        return None if made_by is None or not self._segment.ops[made_by].can_rerun else made_by

    def _readers_of(self) -> dict[int, list[int]]:
        """Returns which ops read each value made here when they run again, of those that may have to."""
        found: dict[int, list[int]] = {}
        waiting = [v for v in self._segment.reads if v in self._maker]
        may_rerun: set[int] = set()
        while waiting:
            made_by = self._made_again_by(waiting.pop())
            if made_by is not None and made_by not in may_rerun:
                may_rerun.add(made_by)
                waiting += [v for v in self._segment.ops[made_by].rerun_reads if v in self._maker]
        self._may_rerun = sorted(may_rerun)
        for i in self._may_rerun:
            for value in dict.fromkeys(self._segment.ops[i].rerun_reads):
                if value in self._maker:
                    found.setdefault(value, []).append(i)
        return found

    def _grouped(self) -> dict[int, int]:
        """Returns the node of each op that may run again.

        An op shares that of the one op that reads its result where it makes nothing else that is read, and its result
        is no smaller than what that one makes: holding that instead takes no more and spares running it again.
        """
        segment, node_of, num_nodes = self._segment, dict[int, int](), _FIRST_NODE
        for i in reversed(self._may_rerun):
            read = [v for v in segment.ops[i].outputs if v in segment.reads or v in self._readers]
            readers = self._readers[read[0]] if len(read) == 1 and read[0] not in segment.reads else []
            if len(readers) == 1 and readers[0] != i:
                made = segment.ops[readers[0]].outputs
                is_larger = segment.value_bytes[read[0]] >= sum(segment.value_bytes[v] for v in made)
                if read[0] in segment.unseen or (is_larger and segment.unseen.isdisjoint(made)):
                    node_of[i] = node_of[readers[0]]
                    continue
            node_of[i] = num_nodes
            num_nodes += 1
        return node_of

    def cheapest(self, seconds_per_byte: float) -> Held | None:
        """Returns the choice with the least `seconds + seconds_per_byte * bytes`; of equals, one that runs least again.

        None if a value that backward reads can neither be held nor rebuilt.
        """
        segment = self._segment
        network = self._network.priced([(edge, seconds_per_byte * nbytes) for edge, nbytes in self._priced])
        side = network.source_side(_SOURCE, _SINK)
        if side is None:
            return None
        rerun = tuple(i for i in self._may_rerun if side[self._node_of[i]])
        read = segment.reads.union(*(segment.ops[i].rerun_reads for i in rerun)) & self._maker.keys()
        again = set(rerun)
        values = tuple(v for v in sorted(read) if v in self._drawn or self._maker[v] not in again)
        return Held(
            values=values,
            rerun=rerun,
            nbytes=sum(segment.value_bytes[v] for v in values),
            seconds=math.fsum(segment.ops[i].seconds for i in rerun),
        )


def cheapest(segment: Segment, seconds_per_byte: float) -> Held | None:
    """Returns a segment's best choice for one price (`Cuts.cheapest`)."""
    return Cuts(segment).cheapest(seconds_per_byte)


def hull(segment: Segment, *, most: int = 24) -> list[Held]:
    """Returns the corners of the hull of (bytes, seconds), most bytes first; at most `most`, those that bend it most.

    The first runs as little again as possible, the last holds as few bytes as possible. Empty if there is no choice.
    """
    total = math.fsum(op.seconds for op in segment.ops)
    every_byte = sum(segment.value_bytes[v] for op in segment.ops for v in op.outputs) or 1
    step = min((op.seconds for op in segment.ops if op.seconds > 0), default=1.0)
    # Low and high enough that no byte outweighs an op, and no op a byte.
    cuts = Cuts(segment)
    first = cuts.cheapest(step / every_byte / 2)
    last = cuts.cheapest(2 * (total or 1.0))
    if first is None or last is None:
        return []
    found = [first]
    if last.nbytes < first.nbytes:
        found.append(last)
        gaps = [(first, last)]
        while gaps and len(found) < most:
            gaps.sort(key=_area)
            left, right = gaps.pop()
            middle = cuts.cheapest((right.seconds - left.seconds) / (left.nbytes - right.nbytes))
            if middle is not None and right.nbytes < middle.nbytes < left.nbytes:
                found.append(middle)
                gaps += [(left, middle), (middle, right)]
    return sorted(found, key=lambda held: -held.nbytes)


def trade_offs(segment: Segment, *, most: int = 24) -> list[Held]:
    """Returns choices none of which another beats in both bytes and seconds, most bytes first: corners, and between.

    Args:
        segment: what to choose in.
        most: how many at most.
    """
    corners = hull(segment, most=most)
    evaluate = Evaluation(segment)
    found = {held.values: held for held in corners}
    for fat, lean in itertools.pairwise(corners):
        for begin, end in ((lean, fat), (fat, lean)):
            for held in evaluate.path(begin, end):
                found.setdefault(held.values, held)
    kept: list[Held] = []
    for held in sorted(found.values(), key=lambda h: (h.nbytes, h.seconds)):
        if not kept or held.seconds < kept[-1].seconds:
            kept.append(held)
    kept.reverse()
    while len(kept) > most:  # the least loss: the one nearest to its neighbours
        losses = [(_area((kept[i - 1], kept[i + 1])), i) for i in range(1, len(kept) - 1)]
        del kept[min(losses)[1]]
    return kept


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """One more value to hold: the bytes it takes, and the seconds that run again no more."""

    value: int
    nbytes: int
    seconds: float


def additions(segment: Segment, values: Collection[int]) -> list[Addition]:
    """Returns the values that lower the seconds of a choice if they are held as well."""
    evaluate = Evaluation(segment)
    now = evaluate.of(values)
    found = []
    for value in {v for i in now.rerun for v in segment.ops[i].outputs}:
        if value not in segment.unseen:
            spared = now.seconds - evaluate.of({*values, value}).seconds
            if spared > 0:
                found.append(Addition(value=value, nbytes=segment.value_bytes[value], seconds=spared))
    return sorted(found, key=lambda a: a.value)


@dataclasses.dataclass(frozen=True, slots=True)
class Switched:
    """What a choice takes if one value is held that was not, or the other way round."""

    value: int
    nbytes: int
    seconds: float


class Evaluation:
    """Evaluates choices of held values: infinite seconds where an op that must not run again would have to."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._maker = maker = {v: i for i, op in enumerate(segment.ops) for v in op.outputs}
        self._drawn = {v for op in segment.ops for v in op.draws}
        self._made_inputs = [[v for v in op.rerun_reads if v in maker] for op in segment.ops]
        self._made_reads = [v for v in segment.reads if v in maker]

    def of(self, values: Collection[int]) -> Held:
        """Returns the evaluated choice that holds those of `values` that backward needs."""
        segment, maker, inputs = self._segment, self._maker, self._made_inputs
        rerun: set[int] = set()
        read: set[int] = set()
        waiting = self._made_reads.copy()
        while waiting:
            value = waiting.pop()
            if value in values or value in self._drawn:
                read.add(value)
            elif (made_by := maker[value]) not in rerun:
                rerun.add(made_by)
                waiting += inputs[made_by]
        seconds = math.fsum(segment.ops[i].seconds for i in rerun)
        return Held(
            values=tuple(sorted(read)),
            rerun=tuple(sorted(rerun)),
            nbytes=sum(segment.value_bytes[v] for v in read),
            seconds=seconds if all(segment.ops[i].can_rerun for i in rerun) else math.inf,
        )

    def path(self, begin: Held, end: Held) -> Iterator[Held]:
        """Yields choices from `begin` to `end`, one value more or less each: the best ratio of bytes to seconds."""
        sign = 1 if end.nbytes > begin.nbytes else -1
        here, values = begin, set(begin.values)
        differing = set(begin.values) ^ set(end.values)
        while differing:
            readers = self.readers(here)
            ways = [w for v in sorted(differing) if (w := self.switched(here, readers, values, v)).seconds < math.inf]
            if not ways:
                return
            value = min(ways, key=lambda way: self._slope(here, way, sign)).value
            values ^= {value}
            differing.discard(value)
            here = self.of(values)
            yield here

    def readers(self, here: Held) -> Mapping[int, int]:
        """Returns how many read each value in a choice: backward, and ops that run again."""
        readers = collections.Counter(self._made_reads)
        readers.update(v for i in here.rerun for v in self._made_inputs[i])
        return readers

    def switched(self, here: Held, readers: Mapping[int, int], values: set[int], value: int) -> Switched:
        """Returns a choice's bytes and seconds with one value more or less; only what leads to that one is walked.

        Args:
            here: the choice. readers: those of it. values: what it may hold.
        """
        segment, maker, inputs = self._segment, self._maker, self._made_inputs
        rerun, left, nbytes = set(here.rerun), dict[int, int](), here.nbytes
        size = segment.value_bytes[value]
        if not readers[value] or value in self._drawn:
            pass
        elif value in values:
            nbytes -= size
            waiting, values = [value], values - {value}
            while waiting:
                at = waiting.pop()
                if at in values or at in self._drawn:
                    if not readers[at] and at not in left:
                        left[at] = 1
                        nbytes += segment.value_bytes[at]
                elif (made_by := maker[at]) not in rerun:
                    rerun.add(made_by)
                    waiting += inputs[made_by]
                    if not segment.ops[made_by].can_rerun:
                        return Switched(value, nbytes, math.inf)
        else:
            nbytes += size
            waiting, values = [value], values | {value}
            while waiting:
                made_by = maker[waiting.pop()]
                if made_by not in rerun:
                    continue
                others = segment.ops[made_by].outputs
                if any(left.get(v, readers[v]) and v not in values and v not in self._drawn for v in others):
                    continue
                rerun.discard(made_by)
                for read in inputs[made_by]:
                    left[read] = left.get(read, readers[read]) - 1
                    if left[read]:
                        continue
                    if read in values or read in self._drawn:
                        nbytes -= segment.value_bytes[read]
                    else:
                        waiting.append(read)
        return Switched(value, nbytes, math.fsum([segment.ops[i].seconds for i in rerun]))

    @staticmethod
    def _slope(here: Held, there: Switched, sign: int) -> float:
        gained, paid = here.seconds - there.seconds, there.nbytes - here.nbytes
        if sign > 0:  # seconds won for each byte more
            return -gained / paid if paid > 0 else (-math.inf if gained >= 0 else math.inf)
        return -gained / -paid if paid < 0 else (-math.inf if gained >= 0 else math.inf)


def _area(gap: tuple[Held, Held]) -> float:
    left, right = gap
    return (left.nbytes - right.nbytes) * (right.seconds - left.seconds)
