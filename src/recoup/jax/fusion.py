"""Which ops a compiler fuses into those that read them, after the rules of XLA's instruction fusion.

An elementwise result is part of the fused ops that read it and has no buffer, if all that read it are such ops. An op
of one large operand (`max(x, 0)`) is run again in each fused op that reads it even where others need its result in a
buffer: its reader then reads the operand, which stays alive as long. Dear ops (`exp`, a division) are not run twice.
Around large reductions the library's calls come first (`library.py`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Container, Iterator

from recoup.jax.flat import BARRIER, Flat, Op
from recoup.jax.flops import words
from recoup.jax.library import library_calls

_NOTHING = frozenset(("name", "copy_p", "stop_gradient"))
_RESHAPES = frozenset(("reshape", "squeeze", "expand_dims"))
_FUSED = words(
    """add sub mul div neg exp log tanh logistic max min integer_pow pow sqrt rsqrt abs sign select_n
    convert_element_type eq ne lt le gt ge and or not xor broadcast_in_dim iota square erf sin cos tan log1p expm1
    clamp is_finite add_any slice pad rev transpose concatenate dynamic_slice floor ceil round exp2 rem nextafter
    cbrt erf_inv erfc atan2 shift_left shift_right_logical shift_right_arithmetic population_count copy
    mul_add_any real imag reduce_precision"""
)
_LOOP = _FUSED | _RESHAPES
ELEMENTWISE = _LOOP - words("broadcast_in_dim iota slice dynamic_slice pad rev transpose concatenate")
_DEAR = words("div exp log tanh logistic pow sqrt rsqrt erf sin cos tan log1p expm1 exp2 rem cbrt erf_inv erfc atan2")
Values = frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """What is left to run.

    Attributes:
        ops: those with results in buffers, in the jaxpr's order. reads: for each the values in buffers that it reads.
        behind: for each value those in buffers that reading it reads, by an op that fuses nothing.
        same: values that lie in the buffers of others: what leaves an optimization barrier.
    """

    ops: list[Op]
    reads: list[Values]
    behind: list[Values]
    same: dict[int, Values]

    def buffers(self, values: Values) -> Values:
        """Returns the buffers that values lie in."""
        if self.same.keys().isdisjoint(values):
            return values
        return frozenset().union(*(self.buffers(self.same[v]) if v in self.same else (v,) for v in values))


class _Readers:
    """Who reads each value, views looked through; None for the outside."""

    def __init__(self, flat: Flat, num_stacked: int) -> None:
        self._direct: dict[int, list[Op]] = collections.defaultdict(list)
        for op in flat.ops:
            for value in dict.fromkeys(op.inputs):
                self._direct[value].append(op)
        self._results = set(flat.results[: len(flat.results) - num_stacked])

    def of(self, value: int) -> Iterator[Op | None]:
        """Yields the readers of a value."""
        if value in self._results:
            yield None
        for op in self._direct.get(value, ()):
            if op.name in _NOTHING:
                yield from self.of(op.outputs[0])
            else:
                yield op


def fuse(flat: Flat, num_stacked: int = 0) -> Fused:
    """Returns the ops that are left after fusion.

    Args:
        flat: what runs. num_stacked: how many of the last results are written away as soon as they are made.
    """
    readers = _Readers(flat, num_stacked)
    calls = library_calls(flat, readers.of)
    nothing: Values = frozenset()
    outside, inside = [nothing] * len(flat.sizes), [nothing] * len(flat.sizes)
    fused = Fused(ops=[], reads=[], behind=outside, same={})
    paths = _Paths(flat, calls)
    scalars: set[int] = set()  # and what is broadcast of less than its elements
    for value in flat.arguments:
        outside[value] = inside[value] = frozenset((value,))
    for op in flat.ops:
        call = calls.get(id(op))
        is_inside = call is not None and call.last is not op
        is_reshape = op.name in _RESHAPES and op.inputs and (call is None or is_inside)
        if is_reshape or (op.name in _NOTHING and op.inputs):
            (value, *_), source = op.outputs, op.inputs[0]
            scalars.update((value,) if source in scalars else ())
            if not is_reshape or (inside[source] == outside[source] and len(inside[source]) == 1):
                outside[value], inside[value] = outside[source], inside[source]
                continue
        is_loop = op.name in _LOOP and call is None
        read = nothing.union(*((inside if is_loop else outside)[v] for v in op.inputs))
        if is_inside:
            outside[op.outputs[0]] = inside[op.outputs[0]] = read
            continue
        for value in op.outputs:
            outside[value] = inside[value] = frozenset((value,))
        if is_loop:
            (value,) = op.outputs
            who = list(readers.of(value))
            fusing = [r for r in who if r is not None and r.name in _LOOP and id(r) not in calls]
            if _grows(flat, op):
                scalars.add(value)
            is_dear = op.name in _DEAR and (len(who) > 1 or any(_grows(flat, r) for r in fusing))
            large = {v for v in op.inputs if v not in scalars and flat.sizes[v] * 2 > flat.sizes[value]}
            is_small = len(large) < 2
            is_inner = len(fusing) == len(who) and not is_dear
            is_inner = is_inner and (is_small or len(who) < 2 or all(paths.all_fuse(value, r) for r in fusing))
            if is_inner or (is_small and not is_dear):
                inside[value] = read
            if is_inner:
                outside[value] = read
                continue
        if op.name == BARRIER and len(op.inputs) == len(op.outputs):
            fused.same.update((v, outside[s]) for v, s in zip(op.outputs, op.inputs, strict=True))
        fused.ops.append(op)
        fused.reads.append(read)
    return fused


class _Paths:
    """Whether a value can be part of an op that reads it, by each way that leads there."""

    def __init__(self, flat: Flat, calls: Container[int]) -> None:
        self._calls = calls
        self._makers = {v: op for op in flat.ops for v in op.outputs}
        self._behind = [0] * len(flat.sizes)  # a bit for each value that a value is computed from
        for op in flat.ops:
            bits = 0
            for value in op.inputs:
                bits |= self._behind[value] | 1 << value
            for value in op.outputs:
                self._behind[value] = bits

    def all_fuse(self, value: int, op: Op) -> bool:
        """Whether all operands of an op that are computed from `value` can be part of it, and `value` of them."""
        seen: set[int] = set()
        stack = [op]
        while stack:
            for read in stack.pop().inputs:
                if read == value or read in seen or not self._behind[read] >> value & 1:
                    continue
                seen.add(read)
                maker = self._makers[read]
                if (maker.name not in _LOOP and maker.name not in _NOTHING) or id(maker) in self._calls:
                    return False
                stack.append(maker)
        return True


def _grows(flat: Flat, op: Op) -> bool:
    """Whether an op broadcasts: reads elements of its operand many times."""
    largest = max((flat.sizes[v] for v in op.inputs), default=0)
    return op.name in ("broadcast_in_dim", "iota") and flat.sizes[op.outputs[0]] > largest
