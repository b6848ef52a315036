"""Which ops XLA's CPU backend hands to its library of kernels as one call, with one buffer for the last result.

A call grows around a large reduction: upwards over what it alone reads, elementwise ops and products among them, and
downwards while one op alone reads its result. What the library has no kernel for stays outside (`select`, `clamp`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from recoup.jax._jax import newer_library_kernels
from recoup.jax.flat import Flat, Op, is_row_major_product
from recoup.jax.flops import words

_REDUCTIONS = words("reduce_sum reduce_max reduce_min")
_KERNELS = newer_library_kernels() | words(
    """abs ceil convert_element_type erf exp exp2 expm1 floor integer_pow log log1p logistic neg round rsqrt sign sqrt
    square tanh add add_any sub mul div max min pow"""
)
_MOVES = words("broadcast_in_dim reshape squeeze expand_dims transpose pad")
_DTYPES = words("float32 float64 bfloat16")
_FEWEST_ELEMENTS = 4_096  # of a result or an operand: less is not worth a call


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """Ops that run as one call. last: the one whose result has a buffer."""

    ops: list[Op]
    last: Op


def library_calls(flat: Flat, readers_of: Callable[[int], Iterable[Op | None]]) -> dict[int, Call]:
    """Returns the call that each op is part of, by the op's `id`; ops that are not in one of several are left out.

    Args:
        flat: what runs. readers_of: who reads a value, None for the outside.
    """
    makers = {v: op for op in flat.ops for v in op.outputs}
    found: dict[int, Call] = {}
    for op in reversed(flat.ops):
        if op.name in _REDUCTIONS and id(op) not in found and _is_kernel(flat, op):
            call = Call(ops=[op], last=op)
            found[id(op)] = call
            _grow(flat, call, makers, readers_of, found)
    return found


def _grow(
    flat: Flat,
    call: Call,
    makers: dict[int, Op],
    readers_of: Callable[[int], Iterable[Op | None]],
    found: dict[int, Call],
) -> None:
    """Adds neighbours to a call until none fits."""
    waiting = [call.last]
    while waiting:
        for value in waiting.pop().inputs:
            maker = makers.get(value)
            if maker is None or found.get(id(maker)) is call or not _joins(flat, maker, found):
                continue
            if all(r is not None and found.get(id(r)) is call for v in maker.outputs for r in readers_of(v)):
                waiting += _take(call, maker, found)
        if not waiting:
            readers = [r for v in call.last.outputs for r in readers_of(v)]
            below = readers[0] if len(readers) == 1 else None
            if below is not None and _joins(flat, below, found):
                other = found.get(id(below))
                call.last = below if other is None else other.last
                _take(call, below, found)
                waiting = list(call.ops)  # what else read their operands may be in the call now


def _take(call: Call, op: Op, found: dict[int, Call]) -> list[Op]:
    """Adds an op, and the call that it is part of; returns what was added."""
    other = found.get(id(op))
    added = [op] if other is None else other.ops
    call.ops += added
    found.update((id(o), call) for o in added)
    return added


def _joins(flat: Flat, op: Op, found: dict[int, Call]) -> bool:
    return id(op) in found or _is_kernel(flat, op)


def _is_kernel(flat: Flat, op: Op) -> bool:
    """Whether the library runs an op, and is asked to."""
    if len(op.outputs) != 1 or any(_dtype(flat, v) not in _DTYPES for v in (*op.inputs, *op.outputs)):
        return False
    if op.name in _MOVES:
        return True
    if op.name == "dot_general":
        return is_row_major_product(op.eqn)
    large = any(_num_elements(flat, v) >= _FEWEST_ELEMENTS for v in (*op.inputs, *op.outputs))
    return large and (op.name in _KERNELS or op.name in _REDUCTIONS)


def _dtype(flat: Flat, value: int) -> str:
    return str(getattr(flat.avals[value], "dtype", ""))


def _num_elements(flat: Flat, value: int) -> int:
    return math.prod(getattr(flat.avals[value], "shape", ()))
