"""The Markdown of `frontier.py`, and what counts as a loss or a violation in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

_MIB = 2**20
_ROUNDING_SECONDS = 1e-9


def violations(name: str, result: dict[str, Any]) -> list[str]:
    """Returns every loss and kind of violation of one workload, in words."""
    lines = list(_losses(name, result.get("table")))
    for label in ("points", "alone"):
        found = find_breaks(result.get("curve", {}).get(label, []))
        over, above, higher, slower = _cells(found)
        if found.over or found.above or found.higher or found.slower or found.unmet:
            lines.append(
                f"{name}, {label}: over {over}, above prediction {above}, higher with less {higher}, "
                f"slower with more {slower}, infeasible {found.unmet}"
            )
    return lines


def _losses(name: str, table: dict[str, Any] | None) -> Iterator[str]:
    if table is None:
        return
    for row in table["rows"]:
        ours, theirs = row.get("recoup"), row.get("by_hand")
        if theirs is None:
            continue
        if ours is None:
            yield f"{name} at {row['budget']}: infeasible, and {theirs['name']} fits"
        elif ours["extra_seconds"] > theirs["extra_seconds"] + _ROUNDING_SECONDS:
            yield (
                f"{name} at {row['budget']}: +{_share(ours, table)} % of a step, {theirs['name']} "
                f"+{_share(theirs, table)} %"
            )
    if table["smallest_bytes"] > table["smallest_by_hand_bytes"]:
        yield (
            f"{name}, floor: {table['smallest_bytes'] / _MIB:.2f} MiB, {table['smallest_by_hand']} "
            f"{table['smallest_by_hand_bytes'] / _MIB:.2f}"
        )


@dataclasses.dataclass(slots=True)
class Breaks:
    """How often a list of points breaks a rule, and by how much at most.

    Attributes:
        over: measured above the budget, bytes. above: above the prediction. slower: slower with more bytes, as a share
            of the step. higher: a larger peak measured with fewer bytes, bytes. unmet: infeasible above the floor.
    """

    over: list[float] = dataclasses.field(default_factory=list)
    above: list[float] = dataclasses.field(default_factory=list)
    slower: list[float] = dataclasses.field(default_factory=list)
    higher: list[float] = dataclasses.field(default_factory=list)
    unmet: int = 0


def find_breaks(rows: list[dict[str, Any]]) -> Breaks:
    """Returns what the rows, in order of their budgets, break."""
    found = Breaks()
    before: dict[str, Any] | None = None
    for row in rows:
        if "measured_bytes" not in row:
            found.unmet += 1
            continue
        measured = row["measured_bytes"]
        if measured > row.get("budget_bytes", row["predicted_bytes"]):
            found.over.append(measured - row.get("budget_bytes", row["predicted_bytes"]))
        if measured > row["predicted_bytes"]:
            found.above.append(measured - row["predicted_bytes"])
        if before is not None:
            if row["step_seconds"] > before["step_seconds"] + _ROUNDING_SECONDS:
                found.slower.append(row["step_seconds"] / before["step_seconds"] - 1)
            if measured < before["measured_bytes"]:
                found.higher.append(before["measured_bytes"] - measured)
        before = row
    return found


def _cells(found: Breaks) -> list[str]:
    cells = [
        f"{len(sizes)} (by {max(sizes) / 1024:.1f} KiB)" if sizes else "0"
        for sizes in (found.over, found.above, found.higher)
    ]
    cells.append(f"{len(found.slower)} (by {100 * max(found.slower):.2f} %)" if found.slower else "0")
    return cells


def _share(found: dict[str, Any], table: dict[str, Any]) -> str:
    return f"{100 * found['extra_seconds'] / table['plain_seconds']:.2f}"


def markdown(head: dict[str, str], results: dict[str, Any]) -> str:
    """Returns the report."""
    lines = ["# The frontier against methods by hand", "", *(f"- {k}: {v}" for k, v in head.items()), ""]
    lines += _table(results)
    lines += _floors(results)
    lines += _curves(results)
    return "\n".join(lines) + "\n"


def _table(results: dict[str, Any]) -> Iterator[str]:
    tables = {n: r["table"] for n, r in results.items() if "table" in r}
    sources = sorted({t["cost_source"] for t in tables.values()})
    yield from (
        f"Prediction alone, priced by {', '.join(sources)}: captured under fake tensors, no kernel is run. By hand:",
        "the fastest of torch.utils.checkpoint on every k-th block for all k, sqrt(n) segments, and operator lists",
        "(SAC), each captured with what it patches and priced alike, regions' host time included. Extra time in % of",
        "the plain step, FLOPs run twice in GFLOP. Ratio: extra time of recoup over the best by hand; above 1 loses.",
        "",
        "| workload | budget | MiB | recoup +time | run twice | best by hand | +time | run twice | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    )
    for name, table in tables.items():
        for row in table["rows"]:
            ours, theirs = row.get("recoup"), row.get("by_hand")
            cells = [name, row["budget"], f"{row['budget_bytes'] / _MIB:.1f}"]
            for found in (ours, theirs):
                if found is theirs and theirs is not None:
                    cells.append(theirs["name"])
                if found is None:
                    cells += ["none fits", "", ""] if found is theirs else ["infeasible", ""]
                else:
                    cells += [f"{_share(found, table)} %", f"{found['recomputed_flops'] / 1e9:.2f}"]
            cells.append(_ratio(ours, theirs))
            yield f"| {' | '.join(cells)} |"
    losses = [line for n, t in tables.items() for line in _losses(n, t)]
    num_rows = sum("by_hand" in row for t in tables.values() for row in t["rows"])
    yield from ("", f"Losses: {len(losses)} of {num_rows} rows in which a method by hand fits, floors included.", "")
    yield from (f"- {line}" for line in losses)
    refused = [f"{n}, {r}" for n, t in tables.items() for r in t.get("refused", [])]
    yield from ("", f"Methods by hand that torch refuses: {'; '.join(refused) or 'none'}.", "")


def _ratio(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> str:
    if ours is None or theirs is None:
        return ""
    if theirs["extra_seconds"] <= 0:
        return "1.000" if ours["extra_seconds"] <= _ROUNDING_SECONDS else "above"
    return f"{ours['extra_seconds'] / theirs['extra_seconds']:.3f}"


def _floors(results: dict[str, Any]) -> Iterator[str]:
    tables = {n: r["table"] for n, r in results.items() if "table" in r}
    yield from ("## The lowest peak", "")
    yield from ("MiB, by the same simulation; for each kind of method its leanest member.", "")
    yield "| workload | plain | recoup | blocks by torch | blocks, segments by recoup's engine | operator lists |"
    yield "|---|---|---|---|---|---|"
    for name, table in tables.items():
        kinds: dict[str, int] = {}
        for method in table["methods"]:
            kind = method["name"].split()[0] if " " in method["name"] else "engine"
            kinds[kind] = min(kinds.get(kind, method["peak_bytes"]), method["peak_bytes"])
        cells = [f"{table['plain_bytes'] / _MIB:.2f}", f"{table['smallest_bytes'] / _MIB:.2f}"]
        cells += [f"{kinds[k] / _MIB:.2f}" if k in kinds else "" for k in ("torch", "engine", "SAC")]
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""


def _curves(results: dict[str, Any]) -> Iterator[str]:
    curves = {n: r["curve"] for n, r in results.items() if "curve" in r}
    if not curves:
        return
    yield from (
        "## Monotone",
        "",
        "Every plan's step under the allocator's meter; costs measured on this machine. *points*: what",
        "`recoup.frontier` returns, each point its own budget. *alone*: budgets evenly spaced from the floor to the",
        "plain peak, each asked for by itself, as `recoup.plan` is. In brackets the worst.",
        "",
        "| workload | asked | points | plans | measured above the budget | above the prediction"
        " | peak higher with fewer bytes | slower with more bytes | largest prediction error |",
        "|---|---|---|---|---|---|---|---|---|",
    )
    for name, curve in curves.items():
        for label in ("points", "alone"):
            rows = [r for r in curve[label] if "measured_bytes" in r]
            error = max(abs(r["measured_bytes"] / r["predicted_bytes"] - 1) for r in rows)
            cells = [name, label, str(len(rows)), str(curve["num_plans"]), *_cells(find_breaks(curve[label]))]
            yield f"| {' | '.join(cells)} | {100 * error:.3f} % |"
