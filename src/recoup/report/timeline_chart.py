"""Memory over the step as a stack of categories, the measured total as a line over it, the peak marked."""

from __future__ import annotations

from html import escape

from recoup.ir.report import MeasuredTimeline, Timeline
from recoup.report.svg import Frame, area, axes, second_unit, steps, text
from recoup.units import format_bytes

_MEASURED_PHASES = {"forward": ("forward", "loss"), "backward": ("backward", "replay"), "optimizer": ("optimizer",)}


def draw_timeline(
    timeline: Timeline,
    measured: MeasuredTimeline | None,
    *,
    name: str,
    budget_bytes: int | None,
    capacity_bytes: int,
    max_seconds: float,
    max_bytes: int,
    unit: tuple[int, str],
    wide: bool,
) -> str:
    """Returns one chart as an `<svg>` element.

    Args:
        name: "plain" or "planned", for the accessible name.
        capacity_bytes: of the device; drawn where the scale reaches it.
        max_seconds, max_bytes: the scale, so that two charts compare.
        unit: of bytes, the page's.
        wide: for a page, else for a phone.
    """
    frame = Frame(
        width=1040 if wide else 350,
        height=290 if wide else 250,
        x_max=max_seconds,
        y_max=max_bytes * 1.08,
        left=58 if wide else 46,
    )
    x_unit, y_unit = second_unit(max_seconds), unit
    parts = [
        axes(
            frame,
            x_unit=x_unit,
            y_unit=y_unit,
            x_name=f"time in the step, predicted ({x_unit[1]})",
            y_name=f"memory ({y_unit[1]})",
        )
    ]
    stride = 1 if wide else 3
    xs = timeline.seconds[::stride]
    low = [0] * len(xs)
    columns = list(zip(*(values for _, values in timeline.series), strict=True))
    chosen = [max(columns[i : i + stride], key=sum) for i in range(0, len(columns), stride)]
    for index, (category, _) in enumerate(timeline.series):
        high = [a + column[index] for a, column in zip(low, chosen, strict=True)]
        shape = area(frame, xs, low, high, end=timeline.duration_seconds)
        parts.append(f'<path class="fill c-{category}" d="{shape}"/>')
        low = high
    parts += _phases(frame, timeline, wide)
    if measured is not None:
        shape = steps(
            frame,
            [_align(t, measured, timeline) for t in measured.seconds],
            measured.total_bytes,
            end=timeline.duration_seconds,
        )
        parts.append(f'<path class="halo" d="{shape}"/><path class="measured" d="{shape}"/>')
    x, y = frame.x(timeline.peak_seconds), frame.y(timeline.peak_bytes)
    for kind, size, words, anchor in (
        ("capacity", capacity_bytes, "device", "start"),
        ("budget", budget_bytes or 0, "budget", "end"),
    ):
        if 0 < size <= frame.y_max:
            level, side = frame.y(size), frame.left + 4 if anchor == "start" else frame.width - frame.right - 3
            parts.append(f'<path class="{kind}" d="M{frame.left} {level:.1f}H{frame.width - frame.right}"/>')
            words = f"{words} {format_bytes(size, unit)}"
            below = abs(level - y) < 16  # where the peak's own words are above the line
            parts.append(text(side, level + (14 if below else -5), words, anchor=anchor, kind=f"over {kind}-text"))
    parts.append(f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')
    anchor = "start" if x < frame.width * (0.6 if wide else 0.38) else "end"
    offset = 8 if anchor == "start" else -8
    parts.append(
        text(x + offset, y - 6, f"peak {format_bytes(timeline.peak_bytes, unit)}", anchor=anchor, kind="over strong")
    )
    parts.append(f'<path class="cursor" d="M0 {frame.top}V{frame.height - frame.bottom}" visibility="hidden"/>')
    label = (
        f"Predicted memory over the {name} step, peak {format_bytes(timeline.peak_bytes)} in the {timeline.phase}"
        + (f"; measured peak {format_bytes(measured.peak_bytes)}" if measured is not None else "")
    )
    return (
        f'<svg class="{"wide" if wide else "narrow"}" viewBox="0 0 {frame.width} {frame.height}" role="img" '
        f'aria-label="{escape(label)}" data-left="{frame.left}" data-right="{frame.right}" '
        f'data-max="{max_seconds:.9g}">'
        f"{''.join(parts)}</svg>"
    )


def _phases(frame: Frame, timeline: Timeline, wide: bool) -> list[str]:
    """Returns the strip below the stack that shows the phases; narrow ones have no name."""
    parts = []
    base = frame.height - frame.bottom
    bounds: list[tuple[str, float, float]] = []
    for phase, begin, end in timeline.phases:
        parts.append(
            f'<rect class="p-{phase}" x="{frame.x(begin):.1f}" y="{base - 6}" '
            f'width="{max(frame.x(end) - frame.x(begin), 0.3):.1f}" height="6"/>'
        )
        stage = "backward" if phase == "replay" else phase
        if bounds and bounds[-1][0] == stage:
            bounds[-1] = (stage, bounds[-1][1], end)
        else:
            bounds.append((stage, begin, end))
    for stage, begin, end in bounds:
        if begin > 0 and stage != "loss":
            parts.append(f'<path class="phase-line" d="M{frame.x(begin):.1f} {frame.top - 14}V{base}"/>')
        if frame.x(end) - frame.x(begin) > (64 if wide else 56):
            parts.append(text(frame.x(begin) + 3, frame.top - 6, stage, kind="small"))
    return parts


def _align(seconds: float, measured: MeasuredTimeline, timeline: Timeline) -> float:
    """Returns the moment on the predicted clock: each phase stretched from its measured to its predicted length."""
    for name, begin, end in measured.phases:
        inside = [p for p in timeline.phases if p[0] in _MEASURED_PHASES.get(name, ())]
        if inside and (seconds <= end or name == measured.phases[-1][0]):
            first, last = inside[0][1], inside[-1][2]
            share = min(max((seconds - begin) / (end - begin), 0.0), 1.0) if end > begin else 0.0
            return first + share * (last - first)
    return seconds / measured.duration_seconds * timeline.duration_seconds if measured.duration_seconds else 0.0
