"""Plans, profiles, curves and evidence of JAX steps as text."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

from recoup.jax.inspection import JaxProfile, Residual
from recoup.jax.jax_plan import JaxPlan
from recoup.jax.layout import EVERYTHING, Segment
from recoup.units import format_bytes, format_flops, format_seconds


def rows(pairs: Sequence[tuple[str, str]]) -> str:
    """Returns lines of "name: value"."""
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"  {name.ljust(width)}  {value}" for name, value in pairs)


def share(part: float, whole: float) -> str:
    """Returns e.g. `"42 %"`."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def format_plan(plan: JaxPlan) -> str:
    """Returns the plan in words, with its predicted costs."""
    p = plan.predicted
    budget = format_bytes(plan.budget_bytes) + ("" if plan.budget_text.isdigit() else f" ({plan.budget_text})")
    lines = [
        (
            "plain peak",
            f"{format_bytes(p.plain_peak_bytes)}, of it {format_bytes(plan.plain_temporary_bytes)} temporaries",
        ),
        ("budget", budget),
        (
            "predicted peak",
            f"{format_bytes(p.peak_bytes)} ({share(p.peak_bytes, p.plain_peak_bytes)} of plain), of it "
            f"{format_bytes(plan.temporary_bytes)} temporaries, simulated",
        ),
        ("compiled", _compiled(plan)),
        ("saved for backward", f"{format_bytes(p.saved_bytes)}, plain {format_bytes(p.plain_saved_bytes)}"),
        (
            "predicted time",
            f"{format_seconds(p.step_seconds)} a step, {100 * p.extra_time_ratio:+.1f} % ({p.cost_source})",
        ),
        (
            "run twice",
            f"{format_flops(p.recomputed_flops)} of {format_flops(p.plain_flops)} "
            f"({share(p.recomputed_flops, p.plain_flops)})",
        ),
        *[("largest at the peak", f"{what} {format_bytes(size)}") for what, size in p.tensors[:1]],
    ]
    does = "".join(f"\n  - {line}" for line in describe(plan.segments))
    notes = "".join(f"\nnote: {note}" for note in plan.notes)
    return f"Plan for {plan.step_name}, simulated on its jaxpr\n{rows(lines)}{does}{notes}"


def _compiled(plan: JaxPlan) -> str:
    if plan.compiled_temporary_bytes is None:
        return "not yet: simulated bytes may be exceeded by some percent; confirm=True or `verify` compile it"
    peak = plan.predicted.peak_bytes - plan.temporary_bytes + plan.compiled_temporary_bytes
    return f"{format_bytes(peak)}, of it {format_bytes(plan.compiled_temporary_bytes)} temporaries"


def describe(segments: Sequence[Segment], depth: int = 0) -> Iterator[str]:
    """Yields what segments do, one line each; neighbours that do the same are one."""
    indent = "  " * depth
    for segment in segments:
        where = f"{indent}units {segment.first}-{segment.last - 1}"
        if segment.recompute:
            held = ", ".join(segment.held[:6]) + (f" and {len(segment.held) - 6} more" if len(segment.held) > 6 else "")
            held = "all that backward reads" if segment.held == (EVERYTHING,) else held
            kept = (
                f", held{' in host memory' if segment.offloaded else ''}: {held}" if held else ", nothing held inside"
            )
            yield f"{where} run again{kept}"
            yield from describe(segment.parts, depth + 1)
        elif not segment.scans:
            yield f"{where} saved by JAX"
        for scan in segment.scans:
            for piece in scan.pieces:
                chunks = f" in chunks of {piece.chunk} that run again" if piece.chunk else ""
                steps = f"{piece.num_steps} steps{chunks}, each" if piece.num_steps > 1 else "inside"
                yield f"{indent}loop of unit {scan.unit}: {steps}"
                yield from describe(piece.body, depth + 1)


def residual_table(found: Sequence[Residual], most: int = 20) -> str:
    """Returns a table of values kept for backward, equal ones in one row."""
    groups: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
    sizes: dict[tuple[str, str, str, str], int] = {}
    for r in found:
        key = (r.op, r.shape, r.name, r.source)
        groups[key] += 1
        sizes[key] = r.nbytes
    order = sorted(groups, key=lambda k: (-groups[k] * sizes[k], k))
    lines = [f"  {'bytes':>11}  {'times':>5}  op, shape, name, line"]
    for key in order[:most]:
        lines.append(
            f"  {format_bytes(groups[key] * sizes[key]):>11}  {groups[key]:>5}  {'  '.join(k for k in key if k)}"
        )
    if len(order) > most:
        rest = sum(groups[k] * sizes[k] for k in order[most:])
        lines.append(f"  {format_bytes(rest):>11}         {len(order) - most} more")
    return "\n".join(lines)


def format_profile(profile: JaxProfile) -> str:
    """Returns where an unplanned step's memory goes."""
    saved = sum(r.nbytes for r in profile.residuals)
    head = rows(
        [
            ("peak", f"{format_bytes(profile.peak_bytes)}, simulated on the jaxpr"),
            ("arguments", format_bytes(profile.argument_bytes)),
            ("loss and gradients", format_bytes(profile.output_bytes)),
            ("optimizer state", format_bytes(profile.state_bytes)),
            ("temporaries", format_bytes(profile.temporary_bytes)),
            ("saved for backward", f"{format_bytes(saved)} in {len(profile.residuals)} values"),
            ("FLOPs", format_flops(profile.plain_flops)),
        ]
    )
    ops = ", ".join(f"{name} {count}" for name, count in profile.op_counts[:10])
    return f"Profile of {profile.step_name}\n{head}\n{residual_table(profile.residuals)}\n  ops: {ops}"


def format_frontier(points: Sequence[Any]) -> str:
    """Returns the curve as a table."""
    lines = [f"  {'peak':>11}  {'extra time':>10}  {'run twice':>12}  names held"]
    for point in points:
        lines.append(
            f"  {format_bytes(point.peak_bytes):>11}  {100 * point.extra_time_ratio:>+8.1f} %  "
            f"{format_flops(point.recomputed_flops):>12}  {len(point.plan.names)}"
        )
    return "\n".join(lines)


def format_evidence(evidence: Any) -> str:
    """Returns what was measured, beside what was simulated."""
    e = evidence

    def exact(equal: bool | None, error: float, bound: float) -> str:
        if equal is None:
            return "not compared: no values were given"
        if equal:
            return "bit-equal to plain"
        word = "equal up to rounding" if error <= bound else "DIFFER"
        return f"{word}: largest relative error {error:.1e}; plain runs that round differently are {bound:.1e} apart"

    lines = [
        (
            "temporaries, simulated",
            f"{format_bytes(e.predicted_temporary_bytes)}, plain {format_bytes(e.plain_temporary_bytes)}",
        ),
        (
            "temporaries, compiled",
            f"{format_bytes(e.temporary_bytes)}, plain {format_bytes(e.baseline_temporary_bytes)} ({e.compiler})",
        ),
        ("peak, compiled", f"{format_bytes(e.peak_bytes)} of a budget of {format_bytes(e.budget_bytes)}"),
        (
            "kept for backward",
            f"planned {format_bytes(e.predicted_saved_bytes)}, compiled {format_bytes(e.saved_bytes)} in "
            f"{len(e.compiled_residuals)} values",
        ),
        ("loss", exact(e.loss_equal, e.loss_error, e.error_bound)),
        ("gradients, op by op", exact(e.eager_gradients_equal, e.max_eager_error, e.error_bound)),
        ("gradients, jitted", exact(e.gradients_equal, e.max_gradient_error, e.error_bound)),
    ]
    if e.time_ratio is not None:
        lines.append(("time over plain", f"{e.time_ratio:.3f} (median of pairs)"))
    table = f"\nkept for backward by the compiler\n{residual_table(e.compiled_residuals, 6)}"
    return rows(lines) + table + "".join(f"\nnote: {note}" for note in e.notes)
