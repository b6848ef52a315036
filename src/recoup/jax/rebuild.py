"""The planned step: a program evaluated again, segment by segment, under nested `jax.checkpoint`s.

Each unit is bound as it was traced. A held value gets its name right where it is made, and the checkpoint around its
segment saves names and nothing else.

[Note: results that a derivative reads] The derivative of `exp` reads its result. JAX computes that result inside the
differentiated equation, *before* a name could be put on it, so saving the name alone would still run the equation
again. Such a unit is wrapped: its derivative is the very same, traced, with the name put where the result is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.ad_checkpoint import checkpoint_name

import jax
from recoup.jax._jax import Literal, at_line, bind, open_jaxpr, over_shards, scan_counts
from recoup.jax.layout import EVERYTHING, Piece, Scan, Segment
from recoup.jax.linear import reads_of
from recoup.jax.program import USER_NAME, Program, Unit

Values = dict[int, Any]


def run_segments(program: Program, segments: Sequence[Segment], values: Values) -> None:
    """Runs consecutive segments on `values`, and adds their results."""
    for segment in segments:
        _run_segment(program, segment, values)


def run(program: Program, segments: Sequence[Segment], args: Sequence[Any]) -> list[Any]:
    """Returns the program's results on `args`, its segments run as `segments` says."""
    values: Values = dict(zip(program.inputs, args, strict=True))
    values.update(program.consts)
    run_segments(program, segments, values)
    return [_value(operand, values) for operand in program.outputs]


def _value(operand: Any, values: Mapping[int, Any]) -> Any:
    return operand.val if isinstance(operand, Literal) else values[operand]


def _run_segment(program: Program, segment: Segment, values: Values) -> None:
    if not segment.recompute:
        _run_inside(program, segment, values)
        return
    entering = program.entering(segment.first, segment.last)
    leaving = program.leaving(segment.first, segment.last)

    def body(*args: Any) -> list[Any]:
        inside = dict(zip(entering, args, strict=True))
        _run_inside(program, segment, inside)
        return [inside[v] for v in leaving]

    again = jax.checkpoint(body, policy=policy_of(segment))
    values.update(zip(leaving, again(*(values[v] for v in entering)), strict=True))


def policy_of(segment: Segment) -> Any:
    """Returns the checkpoint policy that saves what the segment holds; None: nothing."""
    if segment.offloaded:
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[n for n in segment.held if n not in segment.offloaded],
            names_which_can_be_offloaded=list(segment.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    if segment.held == (EVERYTHING,):
        return jax.checkpoint_policies.everything_saveable
    return jax.checkpoint_policies.save_only_these_names(*segment.held) if segment.held else None


def _run_inside(program: Program, segment: Segment, values: Values) -> None:
    if segment.parts:
        for part in segment.parts:
            _run_segment(program, part, values)
        return
    held = frozenset(segment.held)
    scans = {scan.unit: scan for scan in segment.scans}
    for unit in program.units[segment.first : segment.last]:
        operands = [_value(operand, values) for operand in unit.operands]
        if unit.index in scans:
            with at_line(unit.eqn):
                results = run_scan(program, unit, scans[unit.index], operands)
        elif unit.kind == USER_NAME and unit.eqn.params["name"] in held:
            results = operands  # its operand has the name already, where it was made
        else:
            names = tuple(name if (name := program.name(v)) in held else None for v in unit.outputs)
            results = _run_unit(unit, operands, names)
        values.update(zip(unit.outputs, results, strict=True))


def _named(values: Sequence[Any], names: Sequence[str | None]) -> list[Any]:
    return [v if n is None else checkpoint_name(v, n) for v, n in zip(values, names, strict=True)]


def _run_unit(unit: Unit, operands: Sequence[Any], names: tuple[str | None, ...]) -> list[Any]:
    """Returns the unit's results, those with a name named, so that saving the name spares running the unit."""
    if not any(names) or unit.kind == USER_NAME:
        return bind(unit.eqn, operands)
    reads = reads_of(unit)
    if unit.kind.startswith("custom_vjp_call"):
        return _run_with_own_vjp(unit, operands, names)
    if not reads.outputs:
        with at_line(unit.eqn):
            return _named(bind(unit.eqn, operands), names)

    @jax.custom_jvp
    def held(*args: Any) -> list[Any]:
        with at_line(unit.eqn):
            return _named(bind(unit.eqn, args), names)

    @held.defjvp
    def _(primals: Any, tangents: Any) -> Any:  # see [Note: results that a derivative reads]
        traced = jax.make_jaxpr(lambda p, t: jax.jvp(lambda *args: bind(unit.eqn, args), p, t))(primals, tangents)
        inner, consts = open_jaxpr(traced)
        values = dict(zip(inner.constvars, consts, strict=True))
        values.update(zip(inner.invars, jax.tree.leaves((primals, tangents)), strict=True))
        named = {v: n for v, n in zip(inner.outvars, names, strict=False) if n is not None}

        def read(var: Any) -> Any:
            return var.val if isinstance(var, Literal) else values[var]

        for eqn in inner.eqns:
            results = bind(eqn, [read(v) for v in eqn.invars])
            with at_line(unit.eqn):
                values.update(zip(eqn.outvars, _named(results, [named.get(v) for v in eqn.outvars]), strict=True))
        results = [read(v) for v in inner.outvars]
        return results[: len(names)], results[len(names) :]

    return list(held(*operands))


def _run_with_own_vjp(unit: Unit, operands: Sequence[Any], names: tuple[str | None, ...]) -> list[Any]:
    """Runs a `custom_vjp` function whose results are held, and with them the residuals of its forward rule."""
    name = next(n for n in names if n)

    @jax.custom_vjp
    def held(*args: Any) -> list[Any]:
        with at_line(unit.eqn):
            return _named(bind(unit.eqn, args), names)

    def forward(*args: Any) -> Any:
        results, vjp = jax.vjp(lambda *a: bind(unit.eqn, a), *args)
        mine = {id(a) for a in args}
        kept = jax.tree.map(lambda r: r if id(r) in mine else checkpoint_name(r, name), vjp)
        return _named(results, names), kept

    held.defvjp(forward, lambda vjp, cotangents: vjp(cotangents))
    return list(held(*operands))


def run_scan(program: Program, unit: Unit, scan: Scan, operands: Sequence[Any]) -> list[Any]:
    """Returns a scan's results (last carry, then stacked outputs), its steps run in pieces; a `shard_map`'s results."""
    params, body = unit.eqn.params, program.bodies[unit.index]
    if unit.kind == "shard_map":
        (once,) = scan.pieces
        return list(over_shards(unit.eqn, lambda *shards: tuple(run(body, once.body, shards)))(*operands))
    num_consts, num_carry = scan_counts(unit.eqn)
    reverse = params["reverse"]
    consts, carry = operands[:num_consts], list(operands[num_consts : num_consts + num_carry])
    xs = operands[num_consts + num_carry :]
    stacked = []
    done = 0
    for piece in scan.pieces:
        first = params["length"] - done - piece.num_steps if reverse else done
        done += piece.num_steps
        part = [x[first : first + piece.num_steps] for x in xs] if len(scan.pieces) > 1 else list(xs)

        def step(state: Any, x: Any, piece: Piece = piece) -> Any:
            results = run(body, piece.body, [*consts, *state, *x])
            return results[:num_carry], results[num_carry:]

        def loop(state: Any, part: Any, length: int, step: Any = step, reverse: bool = reverse) -> Any:
            return jax.lax.scan(step, state, part, length=length, reverse=reverse, unroll=params["unroll"])

        if piece.chunk:
            carry, ys = _in_chunks(loop, carry, part, piece, reverse=reverse)
        else:
            carry, ys = loop(carry, part, piece.num_steps)
        stacked.append(ys)
    if reverse:
        stacked.reverse()
    if len(stacked) == 1:
        return [*carry, *stacked[0]]
    return [*carry, *(jax.numpy.concatenate(parts) for parts in zip(*stacked, strict=True))]


def _in_chunks(loop: Any, carry: Any, xs: Any, piece: Piece, *, reverse: bool) -> Any:
    """Runs a loop as a loop over chunks, each of which runs again before its backward."""
    count = piece.num_steps // piece.chunk
    assert count * piece.chunk == piece.num_steps, "chunks cover a piece evenly"

    def chunk(state: Any, part: Any) -> Any:
        return loop(state, part, piece.chunk)

    again = jax.checkpoint(chunk, prevent_cse=False)
    parts = [x.reshape(count, piece.chunk, *x.shape[1:]) for x in xs]
    carry, ys = jax.lax.scan(again, carry, parts, length=count, reverse=reverse)
    return carry, [y.reshape(piece.num_steps, *y.shape[2:]) for y in ys]
