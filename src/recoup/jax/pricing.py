"""What a way to run a segment takes, read off the trace of its own forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
from recoup.jax._jax import Literal, open_jaxpr, struct_of_type
from recoup.jax.cost import Costs
from recoup.jax.flat import Flat, live_eqns
from recoup.jax.flops import eqn_flops, nbytes, result_bytes
from recoup.jax.layout import Segment
from recoup.jax.linear import is_differentiable
from recoup.jax.program import Program
from recoup.jax.rebuild import run_segments
from recoup.jax.simulate import simulate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a segment takes.

    Attributes:
        saved_bytes: there from its forward to its backward. forward_bytes, backward_bytes: peaks above the level
            before its forward. incoming_bytes: of the cotangents that its backward begins with.
        seconds, flops: of forward and backward together.
    """

    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    incoming_bytes: int
    seconds: float
    flops: int


def price(
    program: Program, segments: Sequence[Segment], active: Collection[int], there: Collection[int], costs: Costs
) -> Price:
    """Returns what consecutive segments take.

    Args:
        program: the program. segments: consecutive ones of it.
        active: values that carry a derivative. there: values that stay all the time: arguments and constants.
        costs: seconds of equations.
    """
    first, last = segments[0].first, segments[-1].last
    entering, leaving = program.entering(first, last), program.leaving(first, last)
    carrying = [i for i, v in enumerate(entering) if v in active]
    structs = [struct_of_type(program.avals[v]) for v in entering]

    def forward(*values: Any) -> Any:
        def of_carrying(*chosen: Any) -> list[Any]:
            now = dict(zip(entering, values, strict=True))
            now.update((entering[i], value) for i, value in zip(carrying, chosen, strict=True))
            run_segments(program, segments, now)
            # What nothing asks a derivative of has none: some primitives, as `while`, could not give it.
            return [now[v] if v in active else jax.lax.stop_gradient(now[v]) for v in leaving]

        return jax.vjp(of_carrying, *(values[i] for i in carrying))

    traced, (results, vjp) = jax.make_jaxpr(forward, return_shape=True)(*structs)
    cotangents = [struct_of_type(r, None if is_differentiable(r) else jax.dtypes.float0) for r in results]
    back = jax.make_jaxpr(lambda pull, cts: pull(cts))(vjp, cotangents)
    inner, _ = open_jaxpr(traced)
    always = {inner.invars[i] for i, v in enumerate(entering) if v in there}
    handed_on = {v for v in inner.outvars[: len(results)] if not isinstance(v, Literal)}
    residuals = {v for v in inner.outvars[len(results) :] if not isinstance(v, Literal)} - always
    sizes = {v: nbytes(v.aval) for v in residuals}
    sizes |= {v: n for eqn in inner.eqns for v, n in zip(eqn.outvars, result_bytes(eqn), strict=True) if v in sizes}
    saved = sum(sizes[v] for v in residuals - handed_on)
    kept_results = sum(sizes[v] for v in residuals & handed_on)
    incoming = sum(nbytes(c) for c, v in zip(cotangents, leaving, strict=True) if v in active)
    entered = sum(nbytes(v.aval) for v in inner.invars if v not in always)
    there_and_back = Flat(traced), Flat(back)
    ahead, behind = (simulate(flat, count_outputs=True) for flat in there_and_back)
    eqns = [eqn for flat in there_and_back for eqn in live_eqns(flat)]
    gradients = sum(program.nbytes(entering[i]) for i in carrying if entering[i] in there)
    return Price(
        saved_bytes=saved,
        forward_bytes=entered + ahead.temporary_bytes,
        # Gradients of arguments are outputs of the step, counted there.
        backward_bytes=saved + kept_results + incoming + max(behind.temporary_bytes - gradients, 0),
        incoming_bytes=incoming,
        seconds=sum(map(costs.seconds, eqns)),
        flops=sum(map(eqn_flops, eqns)),
    )
