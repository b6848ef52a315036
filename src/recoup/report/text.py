"""A fit and a curve as text: at most 100 columns, readable without colour."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from recoup.ir.evidence import Evidence
from recoup.ir.plan import Plan
from recoup.ir.profile import FrontierPoint
from recoup.ir.text import format_decisions, format_percent, format_share, width
from recoup.units import format_bytes, format_flops


def format_fit(plan: Plan, evidence: Evidence) -> str:
    """Returns the table a person reads at a glance: the plan in words, the evidence, the verdict."""
    notes = "".join(
        "\n" + textwrap.fill(f"  note: {note}", width(), subsequent_indent="        ") for note in plan.notes
    )
    return (
        f"{plan.model_class} on {plan.device}, budget {plan.budget_text}\n{format_decisions(plan.decisions)}\n"
        f"{evidence}{notes}\n{evidence.verdict}"
    )


def format_frontier(points: Sequence[FrontierPoint]) -> str:
    """Returns the curve as a table."""
    lines = [f"  {'peak':>11} {'of plain':>9} {'time':>9} {'run twice':>12}  regions"]
    for point in points:
        predicted = point.plan.predicted
        lines.append(
            f"  {format_bytes(point.peak_bytes):>11} {format_share(point.peak_bytes, predicted.plain_peak_bytes):>9} "
            f"{format_percent(point.extra_time_ratio):>9} {format_flops(point.recomputed_flops):>12}  "
            f"{len(point.plan.regions)}" + ("" if point.is_exact else ", with tiles, which round differently")
        )
    return "\n".join(lines)
