"""The Markdown of `frontier.py`, and what counts as a loss or a violation in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_MIB = 2**20
_ROUNDING_SECONDS = 1e-9


def violations(name: str, result: dict[str, Any]) -> list[str]:
    """Returns every loss and violation of one workload, in words."""
    return [*_losses(name, result.get("table")), *_breaks(name, result.get("curve"))]


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


def _breaks(name: str, curve: dict[str, Any] | None) -> Iterator[str]:
    if curve is None:
        return
    for label in ("points", "alone"):
        before: dict[str, Any] = {}
        for row in curve[label]:
            where = f"{name}, {label}, {row.get('budget_bytes', row.get('predicted_bytes', 0)) / _MIB:.3f} MiB"
            if "measured_bytes" not in row:
                yield f"{where}: infeasible"
                continue
            over = row["measured_bytes"] - row.get("budget_bytes", row["predicted_bytes"])
            if over > 0:
                yield f"{where}: measured {over} bytes above the {'budget' if label == 'alone' else 'prediction'}"
            elif row["measured_bytes"] > row["predicted_bytes"]:
                yield f"{where}: measured {row['measured_bytes'] - row['predicted_bytes']} bytes above the prediction"
            if before:
                if row["step_seconds"] > before["step_seconds"] + _ROUNDING_SECONDS:
                    slower = row["step_seconds"] / before["step_seconds"] - 1
                    yield f"{where}: more bytes and {100 * slower:.3f} % slower"
                if row["measured_bytes"] < before["measured_bytes"]:
                    less = before["measured_bytes"] - row["measured_bytes"]
                    yield f"{where}: more bytes allowed, measured peak {less} bytes lower"
            before = row


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
    yield ""


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
    yield from (
        "## Monotone",
        "",
        "Budgets evenly spaced from the floor to the plain peak, each asked for as if alone (`recoup.plan`), and the",
        "points of `recoup.frontier`. Every plan's step under the allocator's meter. Costs measured on this machine.",
        "",
        "| workload | budgets | plans | points | largest prediction error | violations |",
        "|---|---|---|---|---|---|",
    )
    for name, curve in curves.items():
        errors = [
            abs(r["measured_bytes"] / r["predicted_bytes"] - 1)
            for r in (*curve["points"], *curve["alone"])
            if "measured_bytes" in r
        ]
        found = len(list(_breaks(name, curve)))
        yield (
            f"| {name} | {len(curve['alone'])} | {curve['num_plans']} | {len(curve['points'])} "
            f"| {100 * max(errors):.3f} % | {found} |"
        )
    yield ""
    yield from (f"- {line}" for n, c in curves.items() for line in _breaks(n, c))
