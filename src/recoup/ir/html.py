"""How values show themselves in a notebook: bars of bytes, memory over a step, and the text below.

One `<div>` with inline styles and no script: it looks the same in light and dark notebooks, and in a saved page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from recoup.units import format_bytes

_TEXT = "font-family: system-ui, sans-serif; font-size: 13px; line-height: 1.4"
_COLORS = ("#3b6fb6", "#c2571a", "#3f8f5b", "#8a5fb0", "#b5963a", "#6f7a86", "#a84a6b", "#4aa0a8", "#d9a441", "#5a4fcf")


def card(title: str, *parts: str) -> str:
    """Returns one block with a title."""
    return f'<div style="{_TEXT}; max-width: 40em"><b>{escape(title)}</b>{"".join(parts)}</div>'


def bars(rows: Sequence[tuple[str, int]], budget_bytes: int | None = None) -> str:
    """Returns a bar chart, one row a bar on one scale, with a line at the budget.

    Args:
        rows: (name, bytes).
    """
    most = max([size for _, size in rows] + [budget_bytes or 1])
    lines = []
    for index, (name, size) in enumerate(rows):
        mark = ""
        if budget_bytes is not None:
            mark = (
                f'<div title="budget {format_bytes(budget_bytes)}" style="position: absolute; top: -2px; bottom: -2px; '
                f'left: {100 * budget_bytes / most:.2f}%; border-left: 2px solid currentColor"></div>'
            )
        lines.append(
            '<div style="display: flex; align-items: center; margin: 3px 0">'
            f'<span style="width: 9em">{escape(name)}</span>'
            '<span style="position: relative; flex: 1; height: 14px">'
            f'<span style="position: absolute; inset: 0 auto 0 0; width: {100 * size / most:.2f}%; '
            f'background: {_COLORS[index % len(_COLORS)]}"></span>{mark}</span>'
            f'<span style="width: 7em; text-align: right">{format_bytes(size)}</span></div>'
        )
    if budget_bytes is not None:
        lines.append(f"<div>The line is the budget, {format_bytes(budget_bytes)}.</div>")
    return "".join(lines)


def stacked(series: Sequence[tuple[str, Sequence[int]]]) -> str:
    """Returns areas on top of each other over one step, with a legend.

    Args:
        series: (name, bytes at each of the same points in time), the lowest first.
    """
    points = min((len(values) for _, values in series), default=0)
    totals = [sum(values[i] for _, values in series) for i in range(points)]
    most = max(totals, default=0)
    if points < 2 or not most:
        return ""
    below = [0] * points
    areas, legend = [], []
    for index, (name, values) in enumerate(series):
        color = _COLORS[index % len(_COLORS)]
        above = [b + v for b, v in zip(below, values, strict=False)]
        way = [_point(i, y, points, most) for i, y in enumerate(above)]
        way += [_point(i, below[i], points, most) for i in reversed(range(points))]
        areas.append(f'<polygon points="{" ".join(way)}" fill="{color}"><title>{escape(name)}</title></polygon>')
        legend.append(
            f'<span style="margin-right: 1em; white-space: nowrap"><span style="color: {color}">&#9632;</span> '
            f"{escape(name)}</span>"
        )
        below = above
    return (
        f'<svg viewBox="0 0 100 20" width="100%" role="img" '
        f'aria-label="memory over one step, at most {format_bytes(most)}">{"".join(areas)}</svg>'
        f"<div>{' '.join(legend)} <span style='white-space: nowrap'>peak {format_bytes(most)}</span></div>"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of text, numbers to the right."""
    cell = '<td style="text-align: right; padding: 1px 12px 1px 0">{}</td>'
    top = "".join(cell.replace("td", "th").format(escape(name)) for name in head)
    body = "".join("<tr>" + "".join(cell.format(escape(text)) for text in row) + "</tr>" for row in rows)
    return f'<table style="font: inherit"><tr>{top}</tr>{body}</table>'


def text(content: str, summary: str = "") -> str:
    """Returns text as it is printed; behind a summary that opens it, if there is one."""
    pre = f'<pre style="font-size: 12px; white-space: pre-wrap; margin: 6px 0">{escape(content)}</pre>'
    return f"<details><summary>{escape(summary)}</summary>{pre}</details>" if summary else pre


def _point(i: int, level: float, points: int, most: int) -> str:
    """Returns a corner in per cent of the chart's width, which is five times its height."""
    return f"{100 * i / (points - 1):.2f},{20 * (1 - level / most):.2f}"
