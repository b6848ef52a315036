"""From the rows of `bench.peers` to a page of tables and pictures; nothing is measured here."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.pictures import draw_pareto, draw_predictions, draw_summary
from bench.points import Row, at_equal_time, cells, has_plan, is_peer, mean, names, nearly_free, points

_ROUNDS_TO_BELIEVE = 3


def write_report(file: Path) -> None:
    """Writes the Markdown page and the pictures beside the JSON file of a run."""
    data = json.loads(file.read_text())
    rows: list[Row] = data["rows"]
    stem = file.stem
    groups = {name: points(r for r in rows if r["workload"] == name) for name in names(rows)}
    groups = {name: found for name, found in groups.items() if found}
    timed = any("time_ratio" in (row.get("recoup") or {}) for row in rows)
    if timed:
        file.with_name(f"{stem}-summary.svg").write_text(draw_summary(groups))
    versions = ", ".join(f"{k} {v}" for k, v in data["versions"].items())
    lines = [
        "# Side by side",
        "",
        f"{data['date']}, {data['machine']}, {versions}; by `python -m bench.peers`.",
        "",
        "Peak bytes by allocator events, weights and batch included; FLOPs of the whole step (matmul, convolution,",
        "attention); CPU time: median of interleaved ratios; all over plain's. recoup was given the method's peak as",
        f"its budget. {_load(rows) if timed else ''}".rstrip(),
        *(_provisional(rows) if timed else _untimed(data["times_of"])),
        "",
        *([f"![slow-down at each budget]({stem}-summary.svg)", ""] if timed else []),
        *summary(rows, timed=timed),
        *_predictions(rows, file),
    ]
    for name, found in groups.items():
        lines += [f"## {name}", ""]
        if timed:
            picture = file.with_name(f"{stem}-{name}.svg")
            picture.write_text(draw_pareto(name, found))
            lines += [f"![time over bytes]({picture.name})", ""]
        lines += [
            "| method | bytes | FLOPs | time | gradients | recoup: bytes | FLOPs | time | gradients | planned in |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(_row(r) for r in rows if r["workload"] == name),
            "",
            f"This workload's rows took {data['wall_seconds'].get(name, math.nan):.0f} s.",
            "",
        ]
    file.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")


def _load(rows: Sequence[Row]) -> str:
    loads = [r["load"] for r in rows if "load" in r]
    return f"Load while timing: {statistics.median(loads)} in the median, {max(loads)} at most." if loads else ""


def _untimed(times_of: dict[str, str]) -> list[str]:
    return [
        "",
        f"**recoup's plans are not timed here**: they were made anew, for bytes and FLOPs. The other methods' rows and "
        f"times are of {times_of['date']}, on {times_of['machine']}.",
    ]


def _provisional(rows: Sequence[Row]) -> list[str]:
    few = sum(r.get("rounds", 1) < _ROUNDS_TO_BELIEVE for r in rows if "time_ratio" in {**r, **(r.get("recoup") or {})})
    if not few:
        return []
    return [
        "",
        f"**The times of {few} rows are provisional** (fewer than {_ROUNDS_TO_BELIEVE} rounds). `python -m bench.peers "
        "--retime` on a machine that does nothing else takes them again, with the plans of this file.",
    ]


def _cells(found: dict[str, Any] | None, row: Row) -> str:
    if found is None:
        return "| | | "
    if "peak_bytes" not in found:
        why = found.get("why_not", "").split(" (largest there")[0]
        return f"{why.replace('|', '/')} | | | "
    if found.get("exact", True):
        exact = "equal"
    else:
        exact = ("equal, but " if found["gradient_error"] == 0 else "") + found["difference"].split(",")[0]
        exact = exact.replace("|", "/")
    time = f"{found['time_ratio']:.2f} +- {found.get('time_spread', 0):.2f}" if "time_ratio" in found else "not timed"
    return (
        f"{found['peak_bytes'] / row['plain_bytes']:.3f} | {found['flops'] / row['plain_flops']:.3f} | {time} | {exact}"
    )


def _row(row: Row) -> str:
    ours = row.get("recoup")
    seconds = f"{ours['planning_seconds']:.1f} s" if ours and "planning_seconds" in ours else ""
    first = _cells(row if "peak_bytes" in row or "why_not" in row else None, row)
    return f"| {row['method']} | {first} | {_cells(ours, row)} | {seconds} |"


def noise(rows: Sequence[Row]) -> float:
    """Returns the largest distance from 1 of plain's time over plain's."""
    return max(
        (abs(r["time_ratio"] - 1) for r in rows if r["method"] == "plain" and "time_ratio" in r), default=math.nan
    )


def over_budget(rows: Sequence[Row]) -> list[str]:
    """Returns the plans that measured above the budget they were given."""
    return [
        f"{r['workload']}, {r['method']} ({o['peak_bytes'] - o['budget_bytes']} bytes over)"
        for r in rows
        if has_plan(r) and (o := r["recoup"]).get("budget_bytes") and o["peak_bytes"] > o["budget_bytes"]
    ]


def more_flops(rows: Sequence[Row]) -> list[str]:
    """Returns the budgets at which recoup runs more FLOPs than the fastest peer that fits."""
    return [
        f"{c.best.workload}, {c.best.method} ({c.ours.flops:.3f} against {c.best.flops:.3f})"
        for c in cells(rows)
        if c.ours and c.ours.flops > c.best.flops * (1 + 1e-9)
    ]


def unreached(rows: Sequence[Row]) -> list[str]:
    """Returns the peers' peaks that recoup did not reach, with its floor."""
    found = []
    for row in rows:
        ours = row.get("recoup") or {}
        if is_peer(row) and "minimum_bytes" in ours:
            floor = ours["minimum_bytes"] / row["plain_bytes"]
            found.append(
                f"{row['workload']}, {row['method']} ({row['peak_bytes'] / row['plain_bytes']:.3f}, floor {floor:.3f})"
            )
    return found


def _is_tiled(row: Row) -> bool:
    plan = (row.get("recoup") or {}).get("plan") or {}
    return any(decision["action"] in ("tile", "tile-loss", "tile-module") for decision in plan.get("decisions", ()))


def summary(rows: Sequence[Row], *, timed: bool = True) -> list[str]:
    """Returns the page's first list: bars with their numbers, losses by name; without `timed` those of bytes, FLOPs."""
    found = cells(rows)
    both = [(c.best, c.ours) for c in found if c.ours]
    if not both:
        return []
    wobble = noise(rows)
    times = [r for best, ours in both if not math.isnan(r := ours.time / best.time)]
    slower = [f"{b.workload}, {b.method} ({o.time / b.time:.2f})" for b, o in both if o.time / b.time > 1 + wobble]
    same = at_equal_time(rows)
    inexact = sum(not p.exact for p in points(rows) if p.is_ours)
    rounding = sum(_is_tiled(row) and not row["recoup"].get("exact", True) for row in rows)
    theirs = sum(not p.exact for p in points(rows) if not p.is_ours)
    flops = mean([o.flops / b.flops for b, o in both])
    begin = f"- At each peer's bytes ({len(both)} budgets), recoup over the fastest peer that fits: "
    lines = [
        f"- Noise, plain's time over plain's: within {100 * wobble:.1f} % on every workload.",
        f"{begin}step time {mean(times):.3f}, FLOPs {flops:.3f} (geometric means). "
        "A plan that several rows ran has the median of their times.",
        f"- Slower than that peer by more than the noise: {_list(slower)}.",
    ]
    if not timed:
        lines = [f"{begin}FLOPs {flops:.3f} (geometric mean)."]
    lines += [
        f"- More FLOPs than that peer: {_list(more_flops(rows))}.",
        f"- Peaks of peers below recoup's floor: {_list(unreached(rows))}.",
        f"- Plans over their budget: {_list(over_budget(rows))}.",
        *(
            [
                "- At each peer's time (within 3 %), recoup's fewest bytes over the fewest of any peer: "
                f"{mean(same):.3f} (geometric mean)."
            ]
            if timed
            else []
        ),
        f"- Points whose gradients, loss, buffers or random streams are not plain's to the bit: recoup {inexact} "
        f"({rounding} of them plans with a tiled head, which sums in another order), peers {theirs}.",
        "",
    ]
    if not timed:
        errors = [abs(o["predicted_bytes"] / o["peak_bytes"] - 1) for r in rows if has_plan(r) for o in [r["recoup"]]]
        lines[-1:] = [f"- Predicted peaks of {len(errors)} plans: off by at most {100 * max(errors):.3f} %.", ""]
        return lines
    lines += [
        "Nearly free: the largest saving with at most 3 % more time.",
        "",
        "| workload | recoup saves | best other method | saves |",
        "|---|---|---|---|",
    ]
    for name, ours, best in nearly_free(rows):
        lines.append(
            f"| {name} | {_saving(ours.bytes if ours else 1)} | {best.method if best else 'none'} | "
            f"{_saving(best.bytes if best else 1)} |"
        )
    return [*lines, ""]


def _saving(share: float) -> str:
    return f"{100 * (1 - share):.0f} %"


def _list(items: Sequence[str]) -> str:
    return f"{len(items)}: {'; '.join(items)}" if items else "none"


def _predictions(rows: Sequence[Row], file: Path) -> list[str]:
    ours = [(r, r["recoup"]) for r in rows if has_plan(r) and "time_ratio" in r["recoup"]]
    if not ours:
        return []
    pairs = [
        (
            f"{r['workload']}, {r['method']}",
            o["predicted_bytes"] / 2**20,
            o["peak_bytes"] / 2**20,
            o["predicted_time_ratio"],
            o["time_ratio"],
        )
        for r, o in ours
    ]
    file.with_name(f"{file.stem}-predictions.svg").write_text(draw_predictions(pairs))
    by_peak = sorted(pairs, key=lambda p: -abs(p[1] / p[2] - 1))
    by_time = sorted(pairs, key=lambda p: -abs(p[3] / p[4] - 1))
    peak_errors = [abs(p[1] / p[2] - 1) for p in pairs]
    time_errors = [abs(p[3] / p[4] - 1) for p in pairs]
    lines = [
        "## Predicted and measured",
        "",
        f"![predicted and measured]({file.stem}-predictions.svg)",
        "",
        f"{len(pairs)} plans. Peak: off by {100 * statistics.median(peak_errors):.3f} % in the median, "
        f"{100 * max(peak_errors):.2f} % at worst. Time over plain: off by "
        f"{100 * statistics.median(time_errors):.1f} % in the median, {100 * max(time_errors):.0f} % at worst.",
        "",
        "| worst | predicted | measured | error |",
        "|---|---|---|---|",
        *(
            f"| peak: {p[0]} | {p[1]:.2f} MiB | {p[2]:.2f} MiB | {100 * (p[1] / p[2] - 1):+.2f} % |"
            for p in by_peak[:5]
        ),
        *(f"| time: {p[0]} | {p[3]:.2f} | {p[4]:.2f} | {100 * (p[3] / p[4] - 1):+.1f} % |" for p in by_time[:5]),
        "",
    ]
    return lines
