"""What backward reads of each unit: which of its operands, which of its results, and whether something in between.

Found by tracing the unit's own vjp alone, once for each distinct unit; so it holds for every primitive, and for
functions with derivatives of their own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

import jax
from recoup.jax._jax import Literal, bind, is_inexact, open_jaxpr
from recoup.jax.flops import eqn_flops, words
from recoup.jax.program import Unit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What the backward of a unit reads.

    Attributes:
        operands, outputs: positions. active: positions of results that carry a derivative.
        flops: of what lies between those and what backward reads, and runs whenever the unit's backward is prepared.
    """

    operands: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    active: tuple[int, ...] = ()
    flops: int = 0


_LINEAR_WITHOUT_READS = words(
    """add sub neg reshape squeeze expand_dims transpose broadcast_in_dim reduce_sum convert_element_type slice pad
    concatenate rev copy name add_any reduce_precision split psum psum_invariant pvary pcast all_gather
    all_gather_invariant reduce_scatter ppermute all_to_all"""
)


def is_differentiable(aval: Any) -> bool:
    """Whether a value of this type can carry a derivative."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and is_inexact(dtype)


def reads_of(unit: Unit, active: Sequence[int] | None = None) -> Reads:
    """Returns what the backward of a unit reads.

    Args:
        unit: the unit.
        active: positions of operands that carry a derivative; None: all that could.
    """
    could = [i for i, v in enumerate(unit.eqn.invars) if not isinstance(v, Literal) and is_differentiable(v.aval)]
    carrying = tuple(could if active is None else [i for i in could if i in active])
    if not carrying:
        return Reads()
    if unit.kind in _LINEAR_WITHOUT_READS:
        return Reads(active=tuple(i for i, v in enumerate(unit.eqn.outvars) if is_differentiable(v.aval)))
    return _cached(_Key(unit.eqn), carrying)


class _Key:
    """An equation, equal to others that do the same to the same types."""

    __slots__ = ("_hash", "_key", "eqn")

    def __init__(self, eqn: Any) -> None:
        self.eqn = eqn
        types = tuple(v.val if isinstance(v, Literal) and np.ndim(v.val) == 0 else v.aval for v in eqn.invars)
        key: Any = (eqn.primitive, types, tuple(sorted(eqn.params.items(), key=lambda item: item[0])))
        try:
            self._hash = hash(key)
        except TypeError:  # a parameter without a hash: equal to itself alone
            key = id(eqn)
            self._hash = hash(key)
        self._key = key

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._key == other._key


@functools.lru_cache(maxsize=4096)
def _cached(key: _Key, carrying: tuple[int, ...]) -> Reads:
    eqn = key.eqn
    variables = [i for i, v in enumerate(eqn.invars) if not isinstance(v, Literal)]

    def forward(*args: Any) -> Any:
        given = dict(zip(variables, args, strict=True))

        def of_carrying(*chosen: Any) -> list[Any]:
            now = given | dict(zip(carrying, chosen, strict=True))
            return bind(eqn, [v.val if isinstance(v, Literal) else now[i] for i, v in enumerate(eqn.invars)])

        return jax.vjp(of_carrying, *(given[i] for i in carrying))

    avals = [jax.ShapeDtypeStruct(eqn.invars[i].aval.shape, eqn.invars[i].aval.dtype) for i in variables]
    try:
        traced, (outputs, vjp) = jax.make_jaxpr(forward, return_shape=True)(*avals)
        cotangents = [jax.ShapeDtypeStruct(o.shape, _cotangent_dtype(o.dtype)) for o in outputs]
        backward, _ = open_jaxpr(jax.make_jaxpr(lambda pull, cts: pull(cts))(vjp, cotangents))
    except NameError:  # speaks of an axis that only a `shard_map` around it names: all it reads, backward may read
        active = tuple(i for i, v in enumerate(eqn.outvars) if is_differentiable(v.aval))
        return Reads(operands=tuple(variables), active=active)
    except (ValueError, NotImplementedError):
        return Reads()  # no derivative: nothing that it makes can be asked for by backward
    inner, _ = open_jaxpr(traced)
    residuals = inner.outvars[len(outputs) :]
    needed = _needed(backward.eqns, backward.outvars)
    asked = [r for r, v in zip(residuals, backward.invars[: len(residuals)], strict=True) if v in needed]
    operand_of = dict(zip(inner.invars, variables, strict=True))
    output_of = {
        v: i for i, v in reversed(list(enumerate(inner.outvars[: len(outputs)]))) if not isinstance(v, Literal)
    }
    makers = {v: e for e in inner.eqns for v in e.outvars}
    operands, results, between, seen = set(), set(), 0, set()
    stack = [r for r in asked if not isinstance(r, Literal)]
    while stack:
        var = stack.pop()
        if var in seen:
            continue
        seen.add(var)
        if var in operand_of:
            operands.add(operand_of[var])
        elif var in output_of:
            results.add(output_of[var])
        elif var in makers:
            maker = makers[var]
            if id(maker) not in seen:
                seen.add(id(maker))
                between += eqn_flops(maker)
            stack += [v for v in maker.invars if not isinstance(v, Literal)]
    cts = backward.invars[len(residuals) :]
    return Reads(
        operands=tuple(sorted(operands)),
        outputs=tuple(sorted(results)),
        active=tuple(i for i, v in enumerate(cts) if v in needed and is_differentiable(outputs[i])),
        flops=between,
    )


def _needed(eqns: Sequence[Any], results: Sequence[Any]) -> set[Any]:
    """Returns the variables that `results` depend on, themselves included."""
    needed = {v for v in results if not isinstance(v, Literal)}
    for eqn in reversed(eqns):
        if any(v in needed for v in eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return needed


def _cotangent_dtype(dtype: Any) -> Any:
    return dtype if is_inexact(dtype) else jax.dtypes.float0
