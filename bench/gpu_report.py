"""The page of a `bench.gpu` run: tables and a picture a workload, from its JSON file alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from bench.peers_report import summary
from bench.pictures import draw_pareto
from bench.points import names, points


def write_report(file: Path) -> None:
    """Writes the Markdown page and the pictures beside the JSON file."""
    data = json.loads(file.read_text())
    rows: list[dict[str, Any]] = data["rows"]
    lines = [
        "# On a GPU",
        "",
        f"{data['date']}, {data['machine']}, CUDA {data['cuda']}, "
        + ", ".join(f"{k} {v}" for k, v in data["versions"].items())
        + "; by `python -m bench.gpu`.",
        "",
        "Peak is max_memory_allocated of the whole step; time is wall clock, medians of interleaved ratios to plain.",
        "",
        "| workload | plain step | op costs added up | error | costs from |",
        "|---|---|---|---|---|",
    ]
    for head in data["workloads"]:
        if "why_not" in head:
            lines.append(f"| {head['workload']} | {head['why_not']} | | | |")
            continue
        lines.append(
            f"| {head['workload']} | {1e3 * head['plain_seconds']:.1f} ms | {1e3 * head['table_seconds']:.1f} ms | "
            f"{100 * head['table_error']:+.1f} % | {head['cost_source']} |"
        )
    lines += ["", *summary(rows)]
    for name in names(rows):
        mine = [r for r in rows if r["workload"] == name]
        found = [p for p in points(mine) if not math.isnan(p.time)]
        lines += [f"## {name}", ""]
        if found:
            picture = file.with_name(f"{file.stem}-{name}.svg")
            picture.write_text(draw_pareto(name, found))
            lines += [f"![time over bytes]({picture.name})", ""]
        lines += [
            "| way | GiB | bytes | FLOPs | time | a second | gradients | note |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in mine:
            if "peak_bytes" in row or "why_not" in row:
                lines.append(_line(row["method"], row, row))
            if "recoup" in row:
                lines.append(_line(f"recoup at {row['method']}", row["recoup"], row))
        lines += ["", f"These rows took {data['wall_seconds'].get(name, math.nan):.0f} s.", ""]
    file.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")


def _line(label: str, found: dict[str, Any], row: dict[str, Any]) -> str:
    if "peak_bytes" not in found:
        return f"| {label} | | | | | | | {found['why_not'].replace('|', '/')} |"
    exact = "equal" if found["exact"] else f"off by {found['gradient_error']:.0e}"
    rate = f"{found['items_per_second']:,.0f} {found['unit']}" if "items_per_second" in found else ""
    note = ""
    if "predicted_bytes" in found:
        note = f"predicted peak {100 * (found['predicted_bytes'] / found['peak_bytes'] - 1):+.2f} %"
    time = f"{found.get('time_ratio', math.nan):.3f}"
    return (
        f"| {label} | {found['peak_bytes'] / 2**30:.2f} | {found['peak_bytes'] / row['plain_bytes']:.3f} | "
        f"{found['flops'] / row['plain_flops']:.3f} | {time} | {rate} | {exact} | {note} |"
    )
