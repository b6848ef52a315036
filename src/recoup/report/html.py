"""One offline HTML page from a report: inline SVG, one style sheet, one script, nothing from elsewhere."""

from __future__ import annotations

import json
from functools import cache, partial
from importlib.resources import files
from typing import Any

import jinja2

from recoup.ir.advice import advise
from recoup.ir.decision import describe_decisions
from recoup.ir.report import MOST_ROWS, ModuleRow, Report, Timeline
from recoup.report.folded_rows import fold_rows
from recoup.report.frontier_chart import draw_frontier
from recoup.report.timeline_chart import draw_timeline
from recoup.units import byte_unit, format_bytes, format_flops, format_seconds

CATEGORY_NAMES = {
    "parameter": "parameters",
    "buffer": "buffers",
    "library": "libraries, rounding",
    "optimizer": "optimizer state",
    "batch": "batch",
    "gradient": "gradients",
    "saved": "saved by autograd",
    "kept": "kept to run again from",
    "rebuilt": "rebuilt in backward",
    "temporary": "temporary",
}


def format_html(report: Report) -> str:
    """Returns the page.

    Args:
        report: whatever parts it has are shown; a report made from a plan alone has words and predictions only.
    """
    charts = _charts(report)
    rows = _shown_rows(fold_rows(report.rows))
    unit = byte_unit(_largest(report))
    return (
        _environment()
        .get_template("report.html")
        .render(
            report=report,
            charts=charts,
            legend=[c for c in CATEGORY_NAMES if any(c == name for chart in charts for name, _ in chart["series"])],
            names=CATEGORY_NAMES,
            share=_share,
            max_seconds=max((c["data"]["max"] for c in charts), default=0) / 1e6 or 1.0,
            data=json.dumps([chart["data"] for chart in charts], separators=(",", ":")),
            frontier_wide=draw_frontier(report, unit=unit, wide=True),
            frontier_narrow=draw_frontier(report, unit=unit, wide=False),
            cards=_cards(report, unit),
            fall=_fall(report),
            in_unit=partial(format_bytes, unit=unit),
            verdict=_verdict(report),
            evidence=_evidence(report),
            words=describe_decisions(report.plan.decisions) if report.plan is not None else [],
            figures=_figures(report),
            advice=advise(report.profile) if report.profile is not None else [],
            rows=rows,
            num_left_out=len(fold_rows(report.rows)) - len(rows),
            total_saved=max((row.plain_saved_bytes for row in rows), default=0) or 1,
        )
        .replace("\n\n", "\n")
    )


@cache
def _environment() -> jinja2.Environment:
    folder = files("recoup.report") / "templates"
    sources = {name: (folder / name).read_text() for name in ("report.html", "report.css", "report.js")}
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(sources),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(bytes=format_bytes, seconds=format_seconds, flops=format_flops, percent=_percent)
    return environment


def _share(part: float, whole: float) -> str:
    percent = 100 * part / whole if whole else 0.0
    return "< 1 %" if 0 < percent < 0.5 else f"{percent:.0f} %"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:+.1f} %"


def _largest(report: Report) -> int:
    """Returns the largest peak on the page in bytes: its unit is used by all cards and axes."""
    steps = (report.plain, report.planned, report.measured_plain, report.measured_planned)
    peaks = [step.peak_bytes for step in steps if step is not None]
    if report.plan is not None:
        peaks += [report.plan.predicted.plain_peak_bytes, report.plan.budget_bytes]
    return max(peaks, default=0)


def _fall(report: Report) -> list[tuple[str, int, int]]:
    """Returns (category, bytes at the plain peak, at the planned one): both columns add up to the peaks."""
    if report.plain is None or report.planned is None:
        return []
    plain, planned = dict(report.plain.at_peak), dict(report.planned.at_peak)
    return [(c, plain.get(c, 0), planned.get(c, 0)) for c in CATEGORY_NAMES if c in plain or c in planned]


def _charts(report: Report) -> list[dict[str, Any]]:
    drawn: list[tuple[str, Timeline, Any]] = []
    if report.plain is not None:
        drawn.append(("plain", report.plain, report.measured_plain))
    if report.planned is not None:
        drawn.append(("planned", report.planned, report.measured_planned))
    if not drawn:
        return []
    max_seconds = max(t.duration_seconds for _, t, _ in drawn)
    tops = [t.peak_bytes for _, t, _ in drawn] + [m.peak_bytes for _, _, m in drawn if m is not None]
    unit = byte_unit(_largest(report))
    top = max(tops)
    if top < report.capacity_bytes <= 1.6 * top:  # else the line is far above the chart
        top = report.capacity_bytes
    charts = []
    for name, timeline, measured in drawn:
        svgs = [
            draw_timeline(
                timeline,
                measured,
                name=name,
                budget_bytes=report.plan.budget_bytes if report.plan is not None else None,
                max_seconds=max_seconds,
                capacity_bytes=report.capacity_bytes,
                max_bytes=top,
                unit=unit,
                wide=wide,
            )
            for wide in (True, False)
        ]
        charts.append(
            {
                "name": name,
                "timeline": timeline,
                "measured": measured,
                "series": timeline.series,
                "svgs": svgs,
                "data": _chart_data(timeline, max_seconds),
            }
        )
    return charts


def _chart_data(timeline: Timeline, max_seconds: float) -> dict[str, Any]:
    """Returns the data of the page's script for its read-out: KiB, microseconds."""
    return {
        "t": [round(s * 1e6) for s in timeline.seconds],
        "end": round(timeline.duration_seconds * 1e6),
        "max": round(max_seconds * 1e6),
        "peak": round(timeline.peak_seconds * 1e6),
        "names": [CATEGORY_NAMES[c] for c, _ in timeline.series],
        "series": [[v >> 10 for v in values] for _, values in timeline.series],
        "phases": [[name, round(begin * 1e6)] for name, begin, _ in timeline.phases][:4000],
    }


def _shown_rows(rows: list[ModuleRow]) -> list[ModuleRow]:
    """Returns the rows down to the depth at which there are not too many."""
    depth = max((row.depth for row in rows), default=0)
    while depth > 1 and sum(row.depth <= depth for row in rows) > MOST_ROWS:
        depth -= 1
    return [row for row in rows if row.depth <= depth][:MOST_ROWS]


def _verdict(report: Report) -> tuple[str, str]:
    """Returns (kind, sentence)."""
    plan, evidence = report.plan, report.evidence
    if evidence is not None:
        if evidence.ok:
            return "ok", "Measured: within the budget, and exact."
        return "bad", "Measured: not as promised. See the evidence."
    if plan is None:
        return "none", "The unplanned step; no plan yet."
    if not plan.decisions:
        return "none", "Predicted: the unplanned step fits, nothing is changed. Not measured."
    return "none", "Predicted: within the budget. Not measured."


def _cards(report: Report, unit: tuple[int, str]) -> list[tuple[str, str, str, str]]:
    """Returns (kind, name, value, remark) of the figures at the top; kind is "measured" or "predicted"."""
    plan, evidence = report.plan, report.evidence
    cards: list[tuple[str, str, str, str]] = []
    plain_bytes = plan.predicted.plain_peak_bytes if plan is not None else None
    if plain_bytes is None and report.plain is not None:
        plain_bytes = report.plain.peak_bytes
    if evidence is not None and evidence.baseline_peak_bytes is not None:
        cards.append(("measured", "Plain peak", format_bytes(evidence.baseline_peak_bytes, unit), "without a plan"))
        plain_bytes = evidence.baseline_peak_bytes
    elif plain_bytes is not None:
        cards.append(("predicted", "Plain peak", format_bytes(plain_bytes, unit), "without a plan"))
    if plan is not None:
        peak = evidence.peak_bytes if evidence is not None else plan.predicted.peak_bytes
        remark = (
            f"{100 * peak / plain_bytes:.0f} % of plain, budget {format_bytes(plan.budget_bytes, unit)}"
            if plain_bytes
            else ""
        )
        kind = "measured" if evidence is not None else "predicted"
        cards.append((kind, "Planned peak", format_bytes(peak, unit), remark))
        if evidence is not None and evidence.time_ratio is not None:
            remark = f"+- {100 * (evidence.time_spread or 0):.1f} %, median of pairs"
            cards.append(("measured", "Extra time", _percent(evidence.time_ratio - 1), remark))
        else:
            remark = f"{format_seconds(plan.predicted.step_seconds)} a step, {plan.predicted.cost_source}"
            cards.append(("predicted", "Extra time", _percent(plan.predicted.extra_time_ratio), remark))
        if evidence is not None:
            value = "bit-equal" if evidence.gradients_equal else f"error {evidence.max_gradient_error:.1e}"
            cards.append(("measured", "Gradients", value, "to the plain step's"))
        else:
            share = plan.predicted.recomputed_flops / (plan.predicted.plain_flops or 1)
            remark = f"{100 * share:.1f} % of the step's {format_flops(plan.predicted.plain_flops)}"
            cards.append(("predicted", "Run twice", format_flops(plan.predicted.recomputed_flops), remark))
    elif report.profile is not None:
        profile = report.profile
        cards.append(
            ("predicted", "Held for backward", format_bytes(profile.saved_bytes, unit), "when backward begins")
        )
        cards.append(("predicted", "Step", format_seconds(profile.step_seconds), profile.cost_source))
        cards.append(
            ("predicted", "FLOPs", format_flops(profile.plain_flops), f"{profile.num_parameters:,} parameters")
        )
    return cards


def _evidence(report: Report) -> list[tuple[str, str, str, bool | None]]:
    """Returns (what, predicted, measured, is as promised), "" or None where there is none."""
    plan, evidence = report.plan, report.evidence
    if evidence is None or plan is None:
        return []
    predicted = plan.predicted
    baseline = evidence.baseline_peak_bytes
    ratio = "" if evidence.time_ratio is None else f"{evidence.time_ratio:.3f} +- {evidence.time_spread or 0:.3f}"
    return [
        (
            "peak of the plain step",
            format_bytes(predicted.plain_peak_bytes),
            format_bytes(baseline) if baseline is not None else "does not fit",
            None,
        ),
        (
            "peak of the planned step",
            format_bytes(predicted.peak_bytes),
            f"{format_bytes(evidence.peak_bytes)} of {format_bytes(evidence.budget_bytes)} allowed",
            evidence.within_budget,
        ),
        ("time over plain", f"{1 + predicted.extra_time_ratio:.3f}", ratio or "not timed", None),
        (
            "gradients",
            "",
            "bit-equal, every one"
            if evidence.gradients_equal
            else f"differ: largest relative error {evidence.max_gradient_error:.2e}",
            evidence.gradients_equal,
        ),
        ("loss", "", "bit-equal" if evidence.loss_equal else "differs", evidence.loss_equal),
        ("buffers", "", "bit-equal" if evidence.buffers_equal else "differ", evidence.buffers_equal),
        ("random streams", "", "end where plain's end" if evidence.rng_equal else "end elsewhere", evidence.rng_equal),
        (
            "parameters with a gradient",
            "",
            "the same" if evidence.same_gradient_set else "not the same",
            evidence.same_gradient_set,
        ),
        (
            "run twice",
            f"{_count(len(plan.regions), 'region')}, {format_flops(predicted.recomputed_flops)}",
            f"{_count(evidence.num_regions_replayed, 'region')}, "
            f"{_count(evidence.num_rederived, 'saved tensor')} rederived",
            None,
        ),
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _figures(report: Report) -> list[tuple[str, str]]:
    plan = report.plan
    if plan is None:
        return []
    predicted = plan.predicted
    return [
        (
            "budget",
            f"{format_bytes(plan.budget_bytes)}" + (f" ({plan.budget_text})" if not plan.budget_text.isdigit() else ""),
        ),
        ("predicted peak", f"{format_bytes(predicted.peak_bytes)}, in the {predicted.phase}"),
        (
            "held when backward begins",
            f"{format_bytes(predicted.saved_bytes)}, plain {format_bytes(predicted.plain_saved_bytes)}",
        ),
        (
            "predicted time",
            f"{format_seconds(predicted.step_seconds)} a step, plain {format_seconds(predicted.plain_step_seconds)}",
        ),
        ("prices from", predicted.cost_source),
        ("run twice", f"{format_flops(predicted.recomputed_flops)} of {format_flops(predicted.plain_flops)}"),
        ("made for", f"{plan.model_class} (structure {plan.fingerprint}) on {plan.device}"),
        ("made with", ", ".join(f"{name} {version}" for name, version in plan.versions)),
    ]
