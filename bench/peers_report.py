"""From the rows of `bench.peers` to a page of tables and a picture a workload; nothing is measured here."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 380, 60, 46
_NOISE = 1.03


def write_report(file: Path) -> None:
    """Writes the Markdown page and the pictures beside the JSON file of a run."""
    data = json.loads(file.read_text())
    rows: list[dict[str, Any]] = data["rows"]
    names = list(dict.fromkeys(r["workload"] for r in rows))
    lines = [
        "# Side by side",
        "",
        f"{data['date']}, {data['machine']}, torch {data['torch']}, load {data['load']}, by `python -m bench.peers`.",
        "",
        "Peak bytes by allocator events, weights and batch included; FLOPs of the whole step (matmul, convolution,",
        "attention); CPU time: median of three interleaved pairs; all over plain's. recoup was given the method's peak",
        "as its budget.",
        "",
        *_summary(rows),
    ]
    for name in names:
        mine = [r for r in rows if r["workload"] == name]
        picture = file.with_name(f"{file.stem}-{name}.svg")
        picture.write_text(draw(name, mine))
        lines += [
            f"## {name}",
            "",
            f"![time over bytes]({picture.name})",
            "",
            "| method | bytes | FLOPs | time | gradients | recoup: bytes | FLOPs | time | gradients | planned in |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(_row(r) for r in mine),
            "",
        ]
    lines += _predictions(rows)
    file.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _cells(found: dict[str, Any] | None, row: dict[str, Any]) -> str:
    if found is None:
        return "| | | "
    if "peak_bytes" not in found:
        return f"{found.get('why_not', '').replace('|', '/')} | | | "
    exact = "equal" if found["exact"] else f"off by {found['gradient_error']:.0e}"
    return (
        f"{found['peak_bytes'] / row['plain_bytes']:.3f} | {found['flops'] / row['plain_flops']:.3f} | "
        f"{found['time_ratio']:.2f} | {exact}"
    )


def _row(row: dict[str, Any]) -> str:
    ours = row.get("recoup")
    seconds = f"{ours['planning_seconds']:.1f} s" if ours and "planning_seconds" in ours else ""
    return f"| {row['method']} | {_cells(row, row)} | {_cells(ours, row)} | {seconds} |"


def pairs(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns (a peer's row, recoup at its bytes) where both were measured; methods of recoup's own are no peers."""
    found = []
    for row in rows:
        ours = row.get("recoup")
        if ours and "peak_bytes" in row and "peak_bytes" in ours and "(recoup)" not in row["method"]:
            found.append((row, ours))
    return found


def _mean(values: Sequence[float]) -> str:
    return f"{math.exp(statistics.fmean(math.log(v) for v in values)):.3f}" if values else "-"


def _summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    both = pairs(rows)
    if not both:
        return []
    time = [ours["time_ratio"] / peer["time_ratio"] for peer, ours in both]
    flops = [ours["flops"] / peer["flops"] for peer, ours in both]
    over = sum(ours["peak_bytes"] > peer["peak_bytes"] for peer, ours in both)
    lost = [f"{p['workload']}, {p['method']}" for p, o in both if o["flops"] > p["flops"]]
    fewer = []
    for peer, _ in both:
        fast = [
            o["peak_bytes"]
            for r in rows
            if r["workload"] == peer["workload"] and (o := r.get("recoup")) and "peak_bytes" in o
            if o["time_ratio"] <= _NOISE * peer["time_ratio"]
        ]
        fewer.append(min([*fast, peer["plain_bytes"]]) / peer["peak_bytes"])
    unreached = sum("minimum_bytes" in (r.get("recoup") or {}) for r in rows)
    return [
        f"- At a peer's bytes ({len(both)} pairs): recoup's step time over the peer's, geometric mean {_mean(time)}; "
        f"FLOPs {_mean(flops)}; {over} plans over their budget; {unreached} budgets not reached.",
        f"- Pairs in which recoup runs more FLOPs: {'; '.join(lost) if lost else 'none'}.",
        f"- At a peer's time (within 3 %): the smallest of recoup's measured plans over the peer's bytes, geometric "
        f"mean {_mean(fewer)}.",
        "",
    ]


def _predictions(rows: Sequence[dict[str, Any]]) -> list[str]:
    ours = [(r, r["recoup"]) for r in rows if "predicted_bytes" in (r.get("recoup") or {})]
    if not ours:
        return []
    errors = sorted(
        ((abs(o["predicted_bytes"] / o["peak_bytes"] - 1), r["workload"], r["method"]) for r, o in ours), reverse=True
    )
    times = [abs(o["predicted_time_ratio"] / o["time_ratio"] - 1) for _, o in ours]
    return [
        "## Predicted and measured",
        "",
        f"{len(ours)} plans: peak off by {100 * statistics.median(e[0] for e in errors):.2f} % in the median, "
        f"{100 * errors[0][0]:.2f} % at worst ({errors[0][1]}, {errors[0][2]}); time over plain off by "
        f"{100 * statistics.median(times):.1f} % in the median.",
    ]


def draw(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Returns an SVG of time over bytes, peers as squares and recoup as circles."""
    points: list[tuple[float, float, str, bool]] = []
    for row in rows:
        for found, ours in ((row, "(recoup)" in row["method"]), (row.get("recoup") or {}, True)):
            if "peak_bytes" in found:
                label = row["method"] if found is row else f"recoup at the bytes of {row['method']}"
                points.append((found["peak_bytes"] / row["plain_bytes"], found["time_ratio"], label, ours))
    top = max([1.3, *(y for _, y, _, _ in points)]) * 1.03
    low = min([0.9, *(y for _, y, _, _ in points)])

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x * (_WIDTH - _LEFT - 20)) / 1.1,
            _HEIGHT - _BOTTOM - (y - low) / (top - low) * (_HEIGHT - _BOTTOM - 30),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="time over bytes, {name}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="14">{name}: step time over plain, by peak bytes over plain</text>',
    ]
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        x, _ = at(tick, low)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="28" y2="{_HEIGHT - _BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick:.1f}</text>')
    step = 0.1 if top - low < 1 else 0.5
    for i in range(math.ceil(low / step), int(top / step) + 1):
        _, y = at(0, i * step)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{i * step:.1f}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">peak bytes over plain</text>')
    for x, y, label, ours in points:
        px, py = at(x, y)
        shape = (
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5" fill="#0072b2" fill-opacity="0.8">'
            if ours
            else f'<rect x="{px - 5:.1f}" y="{py - 5:.1f}" width="10" height="10" fill="#d55e00" fill-opacity="0.8">'
        )
        end = "</circle>" if ours else "</rect>"
        parts.append(f"{shape}<title>{label}: {x:.3f} of the bytes, {y:.2f} of the time</title>{end}")
    x = _WIDTH - 170
    parts.append(f'<circle cx="{x}" cy="40" r="5" fill="#0072b2"/><text x="{x + 12}" y="44">recoup</text>')
    parts.append(
        f'<rect x="{x + 75}" y="35" width="10" height="10" fill="#d55e00"/><text x="{x + 92}" y="44">peers</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"
