"""A candidate as a plan: prediction, names, notes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import recoup
from recoup.errors import InfeasibleBudget, PlanMismatch
from recoup.ir.plan import Prediction
from recoup.jax.flops import nbytes, sub_jaxprs
from recoup.jax.inspection import residuals_of
from recoup.jax.jax_plan import JaxPlan
from recoup.jax.layout import EVERYTHING
from recoup.jax.planner import Candidate, Planner
from recoup.jax.program import Program
from recoup.jax.simulate import Buffer, Memory
from recoup.jax.trace import Step
from recoup.units import format_bytes


def fingerprint(program: Program) -> str:
    """Returns a short text that is the same for the same trace, in any process."""
    digest = hashlib.sha256(repr([_type(program.avals[v]) for v in program.inputs]).encode())
    for unit in program.units:
        operands = tuple(o if isinstance(o, int) else "literal" for o in unit.operands)
        shapes = tuple(_type(v.aval) for v in unit.eqn.outvars)
        inside = (unit.eqn.params.get("length"), *_kinds(unit.eqn))
        digest.update(repr((unit.kind, operands, unit.outputs, shapes, inside)).encode())
    return digest.hexdigest()[:16]


def _type(aval: Any) -> str:
    """Returns dtype and shape; where a value lies is no matter of the trace."""
    return f"{getattr(aval, 'dtype', aval)}{list(getattr(aval, 'shape', ()))}"


def _kinds(eqn: Any) -> Iterator[str]:
    for inner in sub_jaxprs(eqn):
        for found in getattr(inner, "jaxpr", inner).eqns:
            yield found.primitive.name
            yield from _kinds(found)


def describe_buffer(buffer: Buffer) -> str:
    """Returns e.g. `dot_general float32[8,128] at model.py:12 (block)`."""
    place = f" at {buffer.source}" if buffer.source else ""
    return f"{buffer.primitive} {buffer.shape}{place}"


def prediction(planner: Planner, candidate: Candidate) -> Prediction:
    """Returns the prediction for a candidate's step."""
    plain, step = planner.plain, planner.step

    def saved_bytes(of: Candidate) -> int:
        if not any(unit.kind == "shard_map" for unit in step.program.units):
            return of.saved_bytes
        return sum(r.nbytes for r in residuals_of(step, of.layout))  # those of its values that lie on one device

    return Prediction(
        peak_bytes=planner.peak_bytes(candidate),
        plain_peak_bytes=planner.peak_bytes(plain),
        step_seconds=candidate.seconds,
        plain_step_seconds=plain.seconds,
        recomputed_flops=max(candidate.flops - plain.flops, 0),
        plain_flops=plain.flops,
        saved_bytes=saved_bytes(candidate),
        plain_saved_bytes=saved_bytes(plain),
        phase="loss and gradients",
        tensors=_tensors(candidate.memory),
        cost_source=planner.costs.source,
    )


def _tensors(memory: Memory) -> tuple[tuple[str, int], ...]:
    return tuple((describe_buffer(b), b.nbytes) for b in memory.buffers[:5])


def write_plan(
    planner: Planner, candidate: Candidate, *, budget_bytes: int, budget_text: str, compiled: int | None = None
) -> JaxPlan:
    """Returns the plan; `compiled` are the bytes of temporaries of its step where it was compiled."""
    step = planner.step
    return JaxPlan(
        step_name=step.name,
        fingerprint=fingerprint(planner.whole.program),
        segments=candidate.layout,
        names=held_names(step.program, candidate),
        budget_bytes=budget_bytes,
        budget_text=budget_text,
        device=planner.costs.device.name if planner.costs.device else "any",
        predicted=prediction(planner, candidate),
        temporary_bytes=candidate.memory.temporary_bytes,
        plain_temporary_bytes=planner.plain.memory.temporary_bytes,
        compiled_temporary_bytes=compiled,
        notes=(*_notes(planner, candidate), *_over(planner.fixed_bytes, compiled, budget_bytes)),
        versions=(("recoup", recoup.__version__), ("jax", jax.__version__)),
    )


def held_names(program: Program, candidate: Candidate) -> tuple[tuple[str, int], ...]:
    """Returns the names of the values held, with the bytes of one of them (of one step, in a scan)."""
    sizes = dict(_sizes(program))
    names = dict.fromkeys(name for segment in candidate.layout for part in segment.walk() for name in part.held)
    return tuple((name, sizes[name]) for name in names if name != EVERYTHING)


def _sizes(program: Program) -> Iterator[tuple[str, int]]:
    for value in program.maker:
        yield program.name(value), program.nbytes(value)
    for body in program.bodies.values():
        yield from _sizes(body)


def _notes(planner: Planner, candidate: Candidate) -> Iterator[str]:
    step, program = planner.step, planner.step.program
    if candidate.layout in planner.inexact:
        yield (
            "Gradients are summed in another order than the plain step's, so they round differently: no plan that "
            "keeps their bits fits."
        )
    for unit in program.units:
        if unit.kind == "while":
            yield f"The `while` loop of unit {unit.index} runs as it is: JAX has no reverse derivative of it."
        if unit.kind in ("checkpoint", "remat2", "remat"):
            yield f"The step's own `jax.checkpoint` (unit {unit.index}) is kept as it is, its policy too."
    if sum(planner.whole.shard_bytes) < sum(nbytes(a) for a in planner.whole.avals):
        temporaries = (
            "temporaries count whole, but what a `shard_map` makes."
            if step is planner.whole
            else "temporaries too, weights that it gathers for an op left out."
        )
        yield f"Arguments are sharded: their bytes and gradients' are those on one device; {temporaries}"


def _over(fixed_bytes: int, compiled: int | None, budget_bytes: int) -> Iterator[str]:
    if compiled is not None and fixed_bytes + compiled > budget_bytes:
        yield (
            f"Compiled here it takes {format_bytes(fixed_bytes + compiled)}, {format_bytes(budget_bytes)} were asked "
            "for: it fits simulated alone, and no leaner plan that was compiled takes fewer."
        )


def infeasible(planner: Planner, budget_bytes: int) -> InfeasibleBudget:
    """Returns the error for a budget that no candidate fits."""
    leanest = planner.leanest()
    minimum = planner.peak_bytes(leanest)
    tensors = _tensors(leanest.memory)
    largest = "; ".join(f"{what}: {format_bytes(size)}" for what, size in tensors[:3]) or "nothing"
    return InfeasibleBudget(
        f"Budget {format_bytes(budget_bytes)} is below the smallest reachable peak of `{planner.step.name}`, "
        f"{format_bytes(minimum)}: {format_bytes(planner.fixed_bytes)} are arguments, loss, gradients and optimizer "
        f"state, {format_bytes(leanest.memory.temporary_bytes)} temporaries. Largest there: {largest}. Use budget >= "
        f"{format_bytes(minimum)} ({minimum} bytes), or a smaller batch.",
        budget_bytes=budget_bytes,
        minimum_bytes=minimum,
        phase="backward",
        tensors=tensors,
    )


def over_compiled(planner: Planner, compiled: int, budget_bytes: int) -> InfeasibleBudget:
    """Returns the error for a budget that plans fit simulated, and not compiled; `compiled`: the fewest temporaries."""
    minimum = planner.fixed_bytes + compiled
    return InfeasibleBudget(
        f"Budget {format_bytes(budget_bytes)}: plans of `{planner.step.name}` fit it simulated, and not compiled here: "
        f"{format_bytes(minimum)} is the smallest peak found. Use a budget >= {format_bytes(minimum)} ({minimum} "
        "bytes), or plan without confirm for another backend.",
        budget_bytes=budget_bytes,
        minimum_bytes=minimum,
        phase="backward",
        tensors=(),
    )


def check_fingerprint(step: Step, plan: JaxPlan) -> None:
    """Raises PlanMismatch unless the plan was made for this step."""
    found = fingerprint(step.program)
    if found != plan.fingerprint:
        raise PlanMismatch(
            f"The plan was made for `{plan.step_name}` with fingerprint {plan.fingerprint}; `{step.name}` on these "
            f"arguments has {found}. Plan again: recoup.jax.plan(step, *args, budget=...)."
        )
