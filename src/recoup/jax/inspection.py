"""What is kept between forward and backward: each value with shape, op, name and the user's line; and op counts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from recoup.jax._jax import Literal, open_jaxpr, source_line
from recoup.jax.flat import live_eqns
from recoup.jax.flops import result_bytes, sub_jaxprs
from recoup.jax.jax_plan import JaxPlan
from recoup.jax.layout import Segment
from recoup.jax.planner import Planner
from recoup.jax.rebuild import run
from recoup.jax.trace import Step, gradient_function, loss_function


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One value kept from forward to backward: its bytes, shape, the op that made it, its name and the user's line."""

    nbytes: int
    shape: str
    op: str
    name: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JaxProfile:
    """Where an unplanned step's memory and time go.

    Attributes:
        argument_bytes, output_bytes, state_bytes: there all the time. temporary_bytes: the most alive besides.
        residuals: kept from forward to backward, largest first. op_counts: (primitive, how often it runs).
        timeline: temporary bytes alive, op by op. step_seconds: by `cost_source`.
    """

    step_name: str
    argument_bytes: int
    output_bytes: int
    state_bytes: int
    temporary_bytes: int
    peak_bytes: int
    plain_flops: int
    step_seconds: float
    cost_source: str
    residuals: tuple[Residual, ...]
    op_counts: tuple[tuple[str, int], ...]
    timeline: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        from recoup.jax.text import format_profile

        return format_profile(self)


def residuals_of(step: Step, layout: tuple[Segment, ...]) -> tuple[Residual, ...]:
    """Returns what a layout keeps between forward and backward, arguments left out, largest first."""
    loss = loss_function(step, lambda values: run(step.program, layout, values))

    def forward(*values: Any) -> Any:
        return jax.vjp(lambda chosen: loss(chosen, values), [values[p] for p in step.differentiated], has_aux=True)

    traced, (_, vjp, _) = jax.make_jaxpr(forward, return_shape=True)(*step.avals)
    inner, _ = open_jaxpr(traced)
    count = len(jax.tree.leaves(vjp))
    kept = inner.outvars[1 : 1 + count]
    always = {*inner.invars, *inner.constvars}
    makers = {v: eqn for eqn in inner.eqns for v in eqn.outvars}
    sizes = {v: n for eqn in inner.eqns for v, n in zip(eqn.outvars, result_bytes(eqn), strict=True)}
    found = []
    for var in dict.fromkeys(v for v in kept if not isinstance(v, Literal)):
        if var in always or var not in makers:
            continue
        eqn, name = makers[var], ""
        while eqn.primitive.name in ("name", "reduce_precision", "copy") and eqn.invars[0] in makers:
            name = eqn.params.get("name", name)
            eqn = makers[eqn.invars[0]]
        shape = var.aval.str_short() if hasattr(var.aval, "str_short") else str(var.aval)
        found.append(
            Residual(nbytes=sizes[var], shape=shape, op=eqn.primitive.name, name=str(name), source=source_line(eqn))
        )
    return tuple(sorted(found, key=lambda r: (-r.nbytes, r.shape, r.op)))


def op_counts_of(step: Step, layout: tuple[Segment, ...]) -> tuple[tuple[str, int], ...]:
    """Returns how often each primitive runs in loss and gradients, steps of a scan each, most often first."""
    jaxpr = jax.make_jaxpr(gradient_function(step, lambda v: run(step.program, layout, v)))(*step.avals)
    counts: collections.Counter[str] = collections.Counter()
    for eqn in live_eqns(jaxpr):
        counts.update(dict(_counted(eqn, 1)))
    return tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _counted(eqn: Any, times: int) -> Iterator[tuple[str, int]]:
    inner = list(sub_jaxprs(eqn))
    if not inner:
        yield eqn.primitive.name, times
        return
    times *= int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1
    total: collections.Counter[str] = collections.Counter()
    for jaxpr in inner:
        for found in live_eqns(jaxpr):
            for name, count in _counted(found, times):
                total[name] += count
    yield from total.items()


def profile_of(planner: Planner) -> JaxProfile:
    """Returns the profile of a planner's step."""
    plain, step = planner.plain, planner.step
    return JaxProfile(
        step_name=step.name,
        argument_bytes=planner.argument_bytes,
        output_bytes=planner.output_bytes,
        state_bytes=planner.state_bytes,
        temporary_bytes=plain.memory.temporary_bytes,
        peak_bytes=planner.peak_bytes(plain),
        plain_flops=plain.flops,
        step_seconds=plain.seconds,
        cost_source=planner.costs.source,
        residuals=residuals_of(step, plain.layout),
        op_counts=op_counts_of(step, plain.layout),
        timeline=plain.memory.timeline,
    )


def residuals(step: Any, *args: Any, plan: JaxPlan | None = None, has_aux: bool = False, argnums: Any = 0) -> Any:
    """Returns what a step keeps between forward and backward, under a plan or as JAX does by itself.

    Args:
        step: the loss function, not planned. *args, has_aux, argnums: as for `recoup.jax.plan`.
        plan: what to look at; None: the step as it is.

    Raises:
        PlanMismatch: if the plan was made for another step.

    Example:
        >>> len(recoup.jax.residuals(loss, x)) > 0
        True
    """
    from recoup.jax.trace import trace

    traced = trace(step, args, argnums, has_aux=has_aux)
    whole = (Segment(first=0, last=len(traced.program.units)),)
    return residuals_of(traced, whole if plan is None else plan.segments)
