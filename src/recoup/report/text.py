"""Plans, profiles, curves and evidence as text: at most 100 columns, readable without colour."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from recoup.ir.decision import describe_decisions
from recoup.ir.evidence import Evidence
from recoup.ir.plan import Plan
from recoup.ir.profile import FrontierPoint, Profile
from recoup.report.advice import advise
from recoup.units import format_bytes, format_flops, format_seconds

_WIDTH = 100
_BARS = " .:-=+*#%@"


def _rows(rows: Sequence[tuple[str, str]], indent: int = 2) -> str:
    width = max(len(name) for name, _ in rows)
    lines = []
    for name, value in rows:
        wrapped = textwrap.wrap(value, _WIDTH - indent - width - 2) or [""]
        lines.append(" " * indent + name.ljust(width) + "  " + wrapped[0])
        lines += [" " * (indent + width + 2) + rest for rest in wrapped[1:]]
    return "\n".join(lines)


def _percent(ratio: float) -> str:
    return f"{100 * ratio:+.1f} %"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def format_plan(plan: Plan) -> str:
    """Returns the plan: what it does in model terms, and what that is predicted to cost."""
    predicted = plan.predicted
    plain = predicted.plain_peak_bytes
    if plain > plan.budget_bytes:
        plain_text = f"{format_bytes(plain)}: the unplanned step does not fit the budget"
    else:
        plain_text = f"{format_bytes(plain)}: the unplanned step fits"
    budget = format_bytes(plan.budget_bytes)
    if not plan.budget_text.isdigit():
        budget += f" ({plan.budget_text})"
    largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in predicted.tensors[:3])
    rows = [
        ("plain peak", plain_text),
        ("budget", budget),
        ("predicted peak", f"{format_bytes(predicted.peak_bytes)} ({_share(predicted.peak_bytes, plain)} of plain)"),
        (
            "saved for backward",
            f"{format_bytes(predicted.saved_bytes)}, plain {format_bytes(predicted.plain_saved_bytes)}",
        ),
        (
            "predicted time",
            f"{format_seconds(predicted.step_seconds)} a step, {_percent(predicted.extra_time_ratio)} "
            f"({predicted.cost_source})",
        ),
        (
            "run twice",
            f"{format_flops(predicted.recomputed_flops)} of {format_flops(predicted.plain_flops)} "
            f"({_share(predicted.recomputed_flops, predicted.plain_flops)})",
        ),
        ("peak is set by", f"the {predicted.phase}; largest there: {largest}"),
    ]
    if predicted.offloaded_bytes:
        rows.insert(-1, ("to the host", f"{format_bytes(predicted.offloaded_bytes)} a step, and back"))
    if predicted.num_scan_evaluations:
        rows.insert(-1, ("scans", f"{predicted.num_scan_evaluations} step evaluations, forward and backward"))
    if predicted.num_all_gathers:
        rows.append(("all-gathers", f"{predicted.num_all_gathers} a step on each rank, as without a plan"))
    head = f"Plan for {plan.model_class} on {plan.device}"
    does = "\n".join(
        textwrap.fill(line, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
        for line in describe_decisions(plan.decisions)
    )
    notes = "".join("\n" + textwrap.fill(f"note: {note}", _WIDTH, subsequent_indent="      ") for note in plan.notes)
    return f"{head}\n{_rows(rows)}\n{does}{notes}"


def _exactness(evidence: Evidence) -> str:
    if evidence.gradients_equal:
        return "bit-equal to plain, every one"
    if evidence.max_gradient_error <= evidence.error_bound:
        why = "tiles sum in another order" if evidence.plain_repeats else "plain steps differ by as much"
        return (
            f"equal to plain within rounding ({why}): largest relative error {evidence.max_gradient_error:.1e}, "
            f"bound {evidence.error_bound:.1e}"
        )
    return f"DIFFER: largest relative error {evidence.max_gradient_error:.2e}"


def verdict(evidence: Evidence) -> str:
    """Returns the last line: whether everything that was promised held, and which promise that was."""
    if not evidence.ok:
        why = next(iter(evidence.differences), "")
        if not evidence.within_budget:
            why = f"{format_bytes(evidence.peak_bytes)} is over the budget"
        elif evidence.exact:
            why = "the step did not do what the plan said"
        return f"FAILED: {why}" if why else "FAILED: see above"
    if evidence.gradients_equal and evidence.loss_equal:
        return "ok: within the budget, and exact"
    error = max(evidence.max_gradient_error, evidence.loss_error)
    return (
        f"ok: within the budget, and equal within rounding (largest relative error {error:.1e}, bound "
        f"{evidence.error_bound:.1e})"
    )


def _loss(evidence: Evidence) -> str:
    if evidence.loss_equal:
        return "bit-equal"
    held = evidence.loss_error <= evidence.error_bound
    return f"equal within rounding: relative error {evidence.loss_error:.1e}" if held else "DIFFERS"


def format_evidence(evidence: Evidence) -> str:
    """Returns what was measured."""
    return _rows(_evidence_rows(evidence)) + _evidence_notes(evidence)


def _evidence_rows(evidence: Evidence) -> list[tuple[str, str]]:
    baseline = evidence.baseline_peak_bytes
    error = evidence.predicted_peak_bytes / evidence.peak_bytes - 1 if evidence.peak_bytes else 0.0
    rows = [
        ("plain peak", format_bytes(baseline) + " measured" if baseline is not None else "does not fit"),
        ("budget", format_bytes(evidence.budget_bytes)),
        ("predicted peak", f"{format_bytes(evidence.predicted_peak_bytes)} ({_percent(error)} of measured)"),
        (
            "measured peak",
            format_bytes(evidence.peak_bytes)
            + (f" ({_share(evidence.peak_bytes, baseline)} of plain)" if baseline else "")
            + (", within the budget" if evidence.within_budget else ", OVER THE BUDGET"),
        ),
        ("gradients", _exactness(evidence)),
        ("loss", _loss(evidence)),
        ("buffers", "bit-equal" if evidence.buffers_equal else "DIFFER"),
        ("random streams", "end where plain's end" if evidence.rng_equal else "END ELSEWHERE"),
        *([("replays", _replays(evidence))] if evidence.num_replays_compared else []),
        ("run twice", f"{evidence.num_regions_replayed} regions, {evidence.num_rederived} saved tensors rederived"),
    ]
    if evidence.offloaded_bytes or evidence.predicted_offloaded_bytes:
        agrees = "as predicted" if evidence.moved_as_planned else "predicted "
        agrees += "" if evidence.moved_as_planned else format_bytes(evidence.predicted_offloaded_bytes)
        rows.append(("to the host", f"{format_bytes(evidence.offloaded_bytes)} a step, {agrees}"))
    if evidence.num_scan_evaluations:
        agrees = "as predicted" if evidence.evaluated_as_planned else f"predicted {evidence.predicted_scan_evaluations}"
        rows.append(("scans", f"{evidence.num_scan_evaluations} step evaluations, {agrees}"))
    if evidence.time_ratio is not None:
        rows.append(
            ("time over plain", f"{evidence.time_ratio:.3f} +- {evidence.time_spread or 0:.3f} (median of pairs)")
        )
    return rows


def _replays(evidence: Evidence) -> str:
    saved = f"{evidence.num_replays_compared} saved tensors"
    return f"{saved} bit-equal to the first forward's" if evidence.replays_equal else f"of {saved}, some DIFFER"


def _evidence_notes(evidence: Evidence) -> str:
    shown = () if evidence.values_hold and evidence.buffers_equal and evidence.rng_equal else evidence.differences[:8]
    lines = [f"  differs: {d}" for d in shown]
    lines += [f"  note: {n}" for n in evidence.notes]
    lines.append(f"  meter: {evidence.meter}")
    return "\n" + "\n".join(lines)


def format_fit(plan: Plan, evidence: Evidence) -> str:
    """Returns the table a person reads at a glance: the plan in words, the evidence, the verdict."""
    does = "\n".join(
        textwrap.fill(line, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
        for line in describe_decisions(plan.decisions)
    )
    notes = "".join(
        "\n" + textwrap.fill(f"  note: {note}", _WIDTH, subsequent_indent="        ") for note in plan.notes
    )
    return (
        f"{plan.model_class} on {plan.device}, budget {plan.budget_text}\n{does}\n"
        f"{_rows(_evidence_rows(evidence))}{_evidence_notes(evidence)}{notes}\n{verdict(evidence)}"
    )


def sparkline(values: Sequence[int], width: int = 72) -> str:
    """Returns the values as one line of characters, the largest of each column."""
    if not values:
        return ""
    top = max(values) or 1
    columns = min(width, len(values))
    line = ""
    for i in range(columns):
        chunk = values[
            i * len(values) // columns : max((i + 1) * len(values) // columns, i * len(values) // columns + 1)
        ]
        line += _BARS[round(max(chunk) / top * (len(_BARS) - 1))]
    return line


def format_profile(profile: Profile, *, max_rows: int = 24) -> str:
    """Returns where memory and time go, in one screen."""
    rows = [
        ("peak", f"{format_bytes(profile.peak_bytes)}, in the {profile.phase}"),
        ("saved for backward", format_bytes(profile.saved_bytes)),
        (
            "step",
            f"{format_seconds(profile.step_seconds)}, {format_flops(profile.plain_flops)} ({profile.cost_source})",
        ),
        ("parameters", f"{profile.num_parameters:,}"),
    ]
    at_peak = [
        (f"  {category}", f"{format_bytes(size)} ({_share(size, profile.peak_bytes)})")
        for category, size in profile.at_peak
    ]
    totals = [sum(values) for values in zip(*(series for _, series in profile.timeline), strict=True)]
    lines = [
        f"Profile of {profile.model_class} on {profile.device}",
        _rows(rows),
        "  alive at the peak",
        _rows(at_peak),
        f"  memory over the step |{sparkline(totals)}|",
        f"  {'':<21}{_phase_marks(profile, len(totals))}",
        "",
        f"  {'saved':>11} {'forward':>9} {'backward':>9}  module",
    ]
    shown = _interesting(profile, max_rows)
    for row in profile.rows:
        if id(row) in shown:
            name = "  " * row.depth + (row.path.rsplit(".", 1)[-1] or profile.model_class)
            name += f" ({row.kind})" + (f" call {row.call}" if row.call else "")
            lines.append(
                f"  {format_bytes(row.saved_bytes):>11} {format_seconds(row.forward_seconds):>9} "
                f"{format_seconds(row.backward_seconds):>9}  {name}"[:_WIDTH]
            )
    left = len(profile.rows) - len(shown)
    if left > 0:
        lines.append(f"  {'':>31}  ... and {left} smaller calls (--json has all)")
    for sentence in advise(profile):
        lines.append(textwrap.fill(f"  {sentence}", _WIDTH, subsequent_indent="  "))
    return "\n".join(lines)


def _phase_marks(profile: Profile, num_points: int, width: int = 72) -> str:
    """Returns a line under the sparkline that says where each phase begins."""
    columns = min(width, num_points)
    marks = [" "] * (columns + 12)
    for phase, first, _ in profile.phases:
        if phase == "loss" or not num_points:
            continue
        word = f"^{phase}"
        at = first * columns // num_points
        if all(mark == " " for mark in marks[at : at + len(word)]):
            marks[at : at + len(word)] = word
    return " " + "".join(marks).rstrip()


def _interesting(profile: Profile, max_rows: int) -> set[int]:
    ordered = sorted(profile.rows, key=lambda r: (-r.saved_bytes, r.depth))
    return {id(row) for row in ordered[:max_rows]}


def format_frontier(points: Sequence[FrontierPoint]) -> str:
    """Returns the curve as a table."""
    lines = [f"  {'peak':>11} {'of plain':>9} {'time':>9} {'run twice':>12}  regions"]
    for point in points:
        predicted = point.plan.predicted
        lines.append(
            f"  {format_bytes(point.peak_bytes):>11} {_share(point.peak_bytes, predicted.plain_peak_bytes):>9} "
            f"{_percent(point.extra_time_ratio):>9} {format_flops(point.recomputed_flops):>12}  "
            f"{len(point.plan.regions)}"
        )
    return "\n".join(lines)
