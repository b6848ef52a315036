"""The memory of a jaxpr as XLA's CPU backend runs it: which buffers are alive when.

- Calls are inlined, equal ops merged, dead code left out; operands that a product or convolution reads in another order
  of dimensions are copied (`flat.py`).
- What fuses has no buffer, and what is run again in several fused ops keeps its operands alive (`fusion.py`).
- Ops run breadth first: each joins a queue when its last operand is there.
- A result takes the place of an operand that dies where it is made elementwise, an update in place, a loop's carry.
- Temporaries lie in the outputs' buffers until those are written.
- A loop's stacked results are there from its beginning on, and its body's peak counts as long as it runs.

Not seen: what kernels take for themselves, and gaps between buffers.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from typing import Any

from recoup.jax._jax import open_jaxpr, scan_counts, source_line
from recoup.jax.flat import Flat, Op
from recoup.jax.flops import sub_jaxprs, words
from recoup.jax.fusion import ELEMENTWISE, Fused, fuse

_UPDATES = words("sort dynamic_update_slice scatter scatter-add scatter-mul scatter-min scatter-max")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One buffer alive at the peak: its bytes, the primitive that made it, shape and the user's line."""

    nbytes: int
    primitive: str
    shape: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a simulated run takes.

    Attributes:
        argument_bytes, output_bytes: there all the time. temporary_bytes: the most that is alive besides.
        result_bytes: of each output.
        buffers: alive at that moment, largest first. timeline: temporary bytes alive at each op.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    result_bytes: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    timeline: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Arguments, outputs and temporaries at their most."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes


def simulate(jaxpr: Any, *, count_outputs: bool = False) -> Memory:
    """Returns the memory of one run of `jaxpr`.

    Args:
        jaxpr: what `jax.make_jaxpr` returns, or the `Flat` of it.
        count_outputs: whether outputs are temporaries, from when they are made.
    """
    flat = jaxpr if isinstance(jaxpr, Flat) else Flat(jaxpr)
    return _simulate(flat, count_outputs=count_outputs)


def _simulate(flat: Flat, *, count_outputs: bool, num_stacked: int = 0, first_carry: int | None = None) -> Memory:
    """Returns the memory of one run.

    Args:
        flat: what runs. count_outputs: whether outputs are temporaries.
        num_stacked: how many of the last outputs are written into something larger as soon as they are made.
        first_carry: which argument, and those behind it, the other outputs take the place of; None: they do not.
    """
    fused = fuse(flat, num_stacked)
    order = breadth_first(fused)
    ops = [fused.ops[i] for i in order]
    reads = [fused.buffers(fused.reads[i]) for i in order]
    staying = flat.results[: len(flat.results) - num_stacked]
    outputs = fused.buffers(frozenset().union(*(fused.behind[v] for v in staying))) if staying else frozenset()
    last: dict[int, int] = {}
    for i, read in enumerate(reads):
        last.update(dict.fromkeys(read, i))
    if count_outputs:
        last.update(dict.fromkeys(outputs, len(ops)))
    there = set(flat.arguments)
    homes = {} if count_outputs else _with_carries(flat, fused, ops, last, outputs - there)
    places = {}
    if first_carry is not None:
        places = dict(zip(staying, flat.arguments[first_carry:], strict=False))
    dying: dict[int, list[int]] = {}
    spans: dict[int, list[int]] = {}  # of each temporary buffer, the first and the last op it is there for
    written: dict[int, int] = {}
    for i, (op, read) in enumerate(zip(ops, reads, strict=True)):
        freed = dying.setdefault(i, [])
        for value in op.outputs:
            if value in homes:
                written.setdefault(homes[value], i)
            if value in homes or value in fused.same:
                continue
            if value in places and last.get(places[value], -1) < i + (op.name in ELEMENTWISE):
                continue
            source = _taken_over(flat, fused, op, value, read, freed)
            if source is not None:
                freed.remove(source)
            begin = 0 if value in op.stacked() else i  # filled with zeros before all else
            spans[value] = spans.pop(source) if source is not None else [begin, i]
            spans[value][1] = last.get(value, i)
            dying.setdefault(spans[value][1], []).append(value)
    for value in _in_outputs(flat, spans, written, len(ops)):
        del spans[value]
    timeline = _timeline(flat, ops, spans)
    peak = max(timeline, default=0)
    return Memory(
        argument_bytes=sum(flat.sizes[v] for v in flat.arguments),
        output_bytes=sum(flat.sizes[v] for v in outputs - there),
        temporary_bytes=peak,
        result_bytes=tuple(flat.sizes[v] for v in flat.results),
        buffers=_alive(flat, ops, spans, timeline.index(peak) if timeline else 0),
        timeline=tuple(timeline),
    )


def breadth_first(fused: Fused) -> list[int]:
    """Returns the order in which XLA's CPU backend runs ops: each joins a queue when its last operand is there."""
    maker = {v: i for i, op in enumerate(fused.ops) for v in op.outputs}
    readers: list[list[int]] = [[] for _ in fused.ops]
    waits = []
    for i, read in enumerate(fused.reads):
        makers = {maker[v] for v in read if v in maker}
        waits.append(len(makers))
        for j in makers:
            readers[j].append(i)
    order = [i for i, count in enumerate(waits) if count == 0]
    for i in order:
        for j in readers[i]:
            waits[j] -= 1
            if waits[j] == 0:
                order.append(j)
    return order


def _with_carries(
    flat: Flat, fused: Fused, ops: list[Op], last: dict[int, int], outputs: frozenset[int]
) -> dict[int, int]:
    """Returns outputs, and what becomes one of them in place (what a loop's carry begins with), and which one."""
    homes = {v: v for v in outputs}
    for i in range(len(ops) - 1, -1, -1):
        for begin, end in ops[i].carried():
            if end in homes and begin is not None:
                behind = fused.buffers(fused.behind[begin])
                sources = (r for r in behind if last.get(r) == i and flat.sizes[r] == flat.sizes[end])
                homes.update(dict.fromkeys(sources, homes[end]))
    return homes


def _in_outputs(flat: Flat, spans: dict[int, list[int]], written: dict[int, int], end: int) -> list[int]:
    """Returns the temporaries that lie in an output's buffer until the output is written, largest first placed."""
    free = [(flat.sizes[v], [(first, end)]) for v, first in written.items()]
    free.sort(key=lambda room: room[0])
    found = []
    for value in sorted(spans, key=lambda v: (-flat.sizes[v], v)):
        size, (first, last) = flat.sizes[value], spans[value]
        for _, taken in free[bisect.bisect_left(free, size, key=lambda room: room[0]) :]:
            if all(last < begin or first > stop for begin, stop in taken):
                taken.append((first, last))
                found.append(value)
                break
    return found


def _timeline(flat: Flat, ops: list[Op], spans: dict[int, list[int]]) -> list[int]:
    """Returns the temporary bytes alive at each op, what loops take inside counted."""
    change = [0] * (len(ops) + 2)
    for value, (first, last) in spans.items():
        change[first] += flat.sizes[value]
        change[last + 1] -= flat.sizes[value]
    return [alive + _inside(op) for alive, op in zip(itertools.accumulate(change), ops, strict=False)]


def _taken_over(flat: Flat, fused: Fused, op: Op, value: int, read: frozenset[int], freed: list[int]) -> int | None:
    """Returns the buffer that dies with an op and that a result of it is written into; None: it has its own."""
    if op.name not in ELEMENTWISE:
        begin = op.operands[0] if op.name in _UPDATES else next((b for b, e in op.carried() if e == value), None)
        read = fused.buffers(fused.behind[begin]) if begin is not None else frozenset()
    return next((r for r in freed if r in read and r != value and flat.sizes[r] == flat.sizes[value]), None)


def _alive(flat: Flat, ops: list[Op], spans: dict[int, list[int]], at: int) -> tuple[Buffer, ...]:
    makers = {v: op for op in ops for v in op.outputs}
    alive = [v for v, (first, last) in spans.items() if first <= at <= last]
    alive.sort(key=lambda v: (-flat.sizes[v], v))
    found = []
    for value in alive[:12]:
        op, aval = makers[value], flat.avals[value]
        shape = aval.str_short() if hasattr(aval, "str_short") else str(aval)
        found.append(Buffer(nbytes=flat.sizes[value], primitive=op.name, shape=shape, source=source_line(op.eqn)))
    return tuple(found)


def _inside(step: Op) -> int:
    """Returns the bytes that a loop or a branch takes inside."""
    if step.name not in ("scan", "while", "cond", "shard_map"):
        return 0
    if step.name == "scan":
        num_consts, num_carry = scan_counts(step.eqn)
        (body,) = sub_jaxprs(step.eqn)
        inner, _ = open_jaxpr(body)
        flat = Flat(body, num_sliced=len(inner.invars) - num_consts - num_carry)
        num_stacked = len(inner.outvars) - num_carry
        first_carry = len(inner.constvars) + num_consts
        return _simulate(flat, count_outputs=True, num_stacked=num_stacked, first_carry=first_carry).temporary_bytes
    return max((simulate(j).temporary_bytes for j in sub_jaxprs(step.eqn)), default=0)
