"""Bytes against time: the frontier, the chosen plan, what people do by hand, the budget, and what was measured."""

from __future__ import annotations

from html import escape

from recoup.ir.report import Report
from recoup.report.svg import Frame, axes, text
from recoup.units import format_bytes

_CHARACTER_PIXELS = 7.2  # width of one character of the chart's text
_Box = tuple[float, float, float, float]


def draw_frontier(report: Report, *, unit: tuple[int, str], wide: bool) -> str:
    """Returns the chart as an `<svg>` element, "" where there is no curve.

    Each plan is a link to `#plan-NUMBER`: those of the curve in their order, then those made by hand.

    Args:
        unit: of bytes, the page's.
        wide: for a page, else for a phone.
    """
    if not report.frontier:
        return ""
    points = [(p.peak_bytes, 100 * p.extra_time_ratio) for p in (*report.frontier, *report.baselines)]
    plan, evidence = report.plan, report.evidence
    if plan is not None:
        points += [
            (plan.predicted.peak_bytes, 100 * plan.predicted.extra_time_ratio),
            (plan.budget_bytes, 0.0),
        ]
    if evidence is not None and evidence.time_ratio is not None:
        points.append((evidence.peak_bytes, 100 * (evidence.time_ratio - 1)))
    top, right = max(max(y for _, y in points), 1.0), max(x for x, _ in points)
    bottom = min(min(y for _, y in points), 0.0)
    frame = Frame(
        width=1040 if wide else 350,
        height=320 if wide else 280,
        x_min=min(x for x, _ in points) * 0.92,
        x_max=right * 1.04,
        y_min=bottom * 1.3,
        y_max=top * 1.18,
        left=58 if wide else 40,
    )
    parts = [
        axes(frame, x_unit=unit, y_unit=(1.0, "%"), x_name=f"peak of the step ({unit[1]})", y_name="extra time (%)")
    ]
    taken: list[_Box] = []
    if plan is not None:
        x = frame.x(plan.budget_bytes)
        parts.append(f'<path class="budget" d="M{x:.1f} {frame.top}V{frame.height - frame.bottom}"/>')
        parts.append(
            _label(frame, taken, x, frame.top + 8, f"budget {format_bytes(plan.budget_bytes, unit)}", "budget-text")
        )
    curve, last = "", None
    for p in report.frontier:  # no line from plans that round differently to those that keep every bit
        curve += (
            f"{'L' if p.is_exact == last else 'M'}{frame.x(p.peak_bytes):.1f} {frame.y(100 * p.extra_time_ratio):.1f}"
        )
        last = p.is_exact
    parts.append(f'<path class="curve" d="{curve}"/>')
    marks: list[tuple[float, float, str, str, str]] = []
    for p in report.frontier:
        kind, title = ("dot", "plan") if p.is_exact else ("tile", "plan with tiles")
        marks.append((p.peak_bytes, 100 * p.extra_time_ratio, kind, "", title))
    for p in report.baselines:
        marks.append((p.peak_bytes, 100 * p.extra_time_ratio, "hand", p.name, f"by hand: {p.name}"))
    if plan is not None:
        predicted = plan.predicted
        marks.append(
            (predicted.peak_bytes, 100 * predicted.extra_time_ratio, "plan", "this plan, predicted", "this plan")
        )
    if evidence is not None and evidence.time_ratio is not None:
        ratio = 100 * (evidence.time_ratio - 1)
        marks.append((evidence.peak_bytes, ratio, "real", "measured", "measured"))
    shapes = []
    for number, (peak, extra, kind, _, title) in enumerate(marks):
        x, y = frame.x(peak), frame.y(extra)
        taken.append((x - 6, y - 6, x + 6, y + 6))
        hint = f"{escape(title)}: {format_bytes(peak, unit)}, {extra:+.1f} % time"
        shape = f'<path class="{kind}" d="{_shape(kind, x, y)}"><title>{hint}</title></path>'
        if kind in ("dot", "tile", "hand"):
            area = f'<circle class="touch" cx="{x:.1f}" cy="{y:.1f}" r="11"/>'
            shape = f'<a href="#plan-{number}" aria-label="{hint}">{area}{shape}</a>'
        shapes.append(shape)
    for peak, extra, _, words, _ in marks:
        if words:
            parts.append(_label(frame, taken, frame.x(peak), frame.y(extra), words, "over"))
    parts += shapes  # over the labels' outlines
    label = "Predicted extra time against the peak of the step; the same numbers are in the table below"
    return (
        f'<svg class="{"wide" if wide else "narrow"}" viewBox="0 0 {frame.width} {frame.height}" role="group" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )


def _shape(kind: str, x: float, y: float) -> str:
    """Returns a mark that differs by its form, not only by its colour."""
    if kind == "hand":  # a diamond
        return f"M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6Z"
    if kind == "tile":  # a triangle
        return f"M{x:.1f} {y - 6:.1f}l6 11h-12Z"
    if kind == "real":  # a square
        return f"M{x - 5:.1f} {y - 5:.1f}h10v10h-10Z"
    r = 6.5 if kind == "plan" else 3.5
    return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0Z"


def _label(frame: Frame, taken: list[_Box], x: float, y: float, words: str, kind: str) -> str:
    """Returns the words at the first place beside (x, y) that is free; notes it as taken."""
    width = _CHARACTER_PIXELS * len(words)
    places = [(10.0, 4.0), (-10.0 - width, 4.0)]
    places += [(dx, dy) for dy in (-10.0, 18.0, -24.0, 32.0, -38.0, 46.0) for dx in (8.0, -8.0 - width, -width / 2)]
    best = None
    for dx, dy in places:
        box = (x + dx, y + dy - 11, x + dx + width, y + dy + 3)
        inside = (
            box[0] >= frame.left and box[2] <= frame.width - 2 and box[1] >= 0 and box[3] <= frame.height - frame.bottom
        )
        overlaps = sum(_overlap(box, other) for other in taken)
        rank = (not inside, overlaps)
        if best is None or rank < best[0]:
            best = (rank, box)
        if inside and not overlaps:
            break
    assert best is not None
    box = best[1]
    taken.append(box)
    return text(box[0], box[3] - 3, words, kind=kind)


def _overlap(a: _Box, b: _Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
