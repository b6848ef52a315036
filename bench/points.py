"""What the rows of a side-by-side run say: points, cells, bars. Plain arithmetic, nothing is measured here."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

NEARLY_FREE = 1.03
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One measured way to run a step. bytes, flops, time: over plain's."""

    workload: str
    method: str
    is_ours: bool
    bytes: float
    flops: float
    time: float
    exact: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A budget (the peak of some peer), the fastest peer that fits it, and recoup at it (None: it does not fit)."""

    best: Point
    ours: Point | None


def is_peer(row: Row) -> bool:
    """Whether a row's method is somebody else's."""
    return "peak_bytes" in row and row["method"] != "plain" and "(recoup)" not in row["method"]


def point(row: Row, *, ours: bool) -> Point:
    """Returns a row's method, or recoup at its bytes, as a point."""
    found = row["recoup"] if ours else row
    method = f"recoup at {row['method']}" if ours else row["method"]
    return Point(
        workload=row["workload"],
        method=method,
        is_ours=ours or "(recoup)" in row["method"],
        bytes=found["peak_bytes"] / row["plain_bytes"],
        flops=found["flops"] / row["plain_flops"],
        time=found.get("time_ratio", math.nan),
        exact=found.get("exact", True),
    )


def has_plan(row: Row) -> bool:
    """Whether recoup was measured in a row."""
    return "peak_bytes" in (row.get("recoup") or {})


def points(rows: Iterable[Row]) -> list[Point]:
    """Returns everything that was measured but plain itself."""
    rows = list(rows)
    found = [point(r, ours=False) for r in rows if "peak_bytes" in r and r["method"] != "plain"]
    return found + [point(r, ours=True) for r in rows if has_plan(r)]


def names(rows: Iterable[Row]) -> list[str]:
    """Returns the workloads, in order."""
    return list(dict.fromkeys(r["workload"] for r in rows))


def plan_times(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Returns the time of each plan over plain's: the median where several rows ran the very same one."""
    times: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if has_plan(row) and "time_ratio" in row["recoup"]:
            times.setdefault(_plan_key(row), []).append(row["recoup"]["time_ratio"])
    return {key: statistics.median(found) for key, found in times.items()}


def _plan_key(row: Row) -> tuple[str, str]:
    plan = row["recoup"].get("plan")  # of a row without one, nothing is known but that it is its own
    return row["workload"], json.dumps(plan["decisions"], sort_keys=True) if plan else row["method"]


def cells(rows: Sequence[Row]) -> list[Cell]:
    """Returns one cell for each peer's peak: budgets that coincide are one."""
    found = {}
    times = plan_times(rows)
    for row in rows:
        if not is_peer(row):
            continue
        fitting = [
            point(r, ours=False)
            for r in rows
            if is_peer(r) and r["workload"] == row["workload"] and r["peak_bytes"] <= row["peak_bytes"]
        ]
        best = min(fitting, key=lambda p: (math.isnan(p.time), p.time))
        ours = None
        if has_plan(row):
            ours = point(row, ours=True)
            ours = dataclasses.replace(ours, time=times.get(_plan_key(row), ours.time))
        found[row["workload"], row["peak_bytes"]] = Cell(best=best, ours=ours)
    return list(found.values())


def mean(values: Sequence[float]) -> float:
    """Returns the geometric mean, NaN of nothing."""
    return math.exp(statistics.fmean(math.log(v) for v in values)) if values else math.nan


def at_equal_time(rows: Sequence[Row]) -> list[float]:
    """Returns, for each peer's time, recoup's fewest bytes within 3 % of it over the fewest of any peer."""
    found = []
    for name in names(rows):
        here = [p for p in points(r for r in rows if r["workload"] == name) if not math.isnan(p.time)]
        for peer in (p for p in here if not p.is_ours):
            fewest = min(p.bytes for p in here if not p.is_ours and p.time <= peer.time)
            mine = min([1.0, *(p.bytes for p in here if p.is_ours and p.time <= NEARLY_FREE * peer.time)])
            found.append(mine / fewest)
    return found


def nearly_free(rows: Sequence[Row]) -> list[tuple[str, Point | None, Point | None]]:
    """Returns (workload, recoup's, the best peer's) largest saving with at most 3 % more time; None: none saves."""
    found = []
    for name in names(rows):
        here = points(r for r in rows if r["workload"] == name)
        pair = []
        for ours in (True, False):
            cheap = [p for p in here if p.is_ours == ours and p.time <= NEARLY_FREE and p.bytes < 1]
            pair.append(min(cheap, key=lambda p: p.bytes, default=None))
        found.append((name, pair[0], pair[1]))
    return found


def fastest_within(here: Sequence[Point], budget: float, *, ours: bool) -> float | None:
    """Returns the least time of the points within a budget, plain being one at a budget of 1; None if none fits."""
    fitting = [p.time for p in here if p.is_ours == ours and p.bytes <= budget]
    if budget >= 1:
        fitting.append(1.0)
    return min(fitting, default=None)
