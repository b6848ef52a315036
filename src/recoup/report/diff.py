"""Two plans side by side, in model terms: what is done differently where, and what that changes."""

from __future__ import annotations

from typing import Any

from recoup.ir.decision import Decision
from recoup.ir.decision.paths import ranges, shape_of
from recoup.ir.plan import Plan
from recoup.units import format_bytes, format_flops, format_seconds

_REPLAY = " in the replay of "


def diff_plans(a: Plan, b: Plan) -> dict[str, Any]:
    """Returns the differences as plain data.

    Returns:
        `figures`: name -> [a, b] where they differ. `changes`: path -> [what a does, what b does], for each path that
        a decision of either plan names and that ends up with another action.
    """
    first, second = a.predicted, b.predicted
    figures: dict[str, tuple[Any, Any]] = {
        "model": (f"{a.model_class} {a.fingerprint}", f"{b.model_class} {b.fingerprint}"),
        "device": (a.device, b.device),
        "budget_bytes": (a.budget_bytes, b.budget_bytes),
        "cost_source": (first.cost_source, second.cost_source),
    }
    for name in ("peak_bytes", "plain_peak_bytes", "saved_bytes", "step_seconds", "recomputed_flops"):
        figures[name] = (getattr(first, name), getattr(second, name))
    figures["phase of the peak"] = (first.phase, second.phase)
    figures["regions"] = (len(a.regions), len(b.regions))
    keys = dict.fromkeys([_key(d) for d in a.decisions] + [_key(d) for d in b.decisions])
    keys.update(dict.fromkeys((p, d.call) for plan in (a, b) for d in plan.decisions for p in d.paths[1:]))
    changes: dict[str, list[str]] = {}
    for path, call in keys:
        before, after = action_at(a, path, call), action_at(b, path, call)
        if before != after:
            changes[path if call is None else f"{path} call {call}"] = [before, after]
    # What only moved into a region, or out of one, is said by that region.
    changes = {
        where: pair
        for where, pair in changes.items()
        if not any(_REPLAY in words and words.partition(_REPLAY)[2] in changes for words in pair)
    }
    return {"figures": {k: list(v) for k, v in figures.items() if v[0] != v[1]}, "changes": changes}


def _key(decision: Decision) -> tuple[str, int | None]:
    return decision.path, decision.call


def action_at(plan: Plan, path: str, call: int | None) -> str:
    """Returns the action of `plan` at a path, in words; inherited where no decision names it."""
    own = [d for d in plan.decisions if d.path == path and d.call in (None, call)]
    words = [decision.words_at(path) for decision in own]
    joined = next((d for d in plan.decisions if path in d.paths[1:]), None)
    if joined is not None:
        words.append(joined.words_at(path))
    if words:
        return ", ".join(words)
    parent = path
    while parent:
        parent = parent.rpartition(".")[0]
        for decision in plan.decisions:
            if decision.path == parent and decision.below is not None:
                if decision.is_region:
                    return f"{decision.below}{_REPLAY}{parent}"
                return decision.verb
    return "save"


def format_diff(a: Plan, b: Plan) -> str:
    """Returns the difference as text: figures first, then changes, equal layers said once."""
    found = diff_plans(a, b)
    if not found["figures"] and not found["changes"]:
        return "The plans do the same, and are predicted to cost the same."
    rows = [
        (name.removesuffix("_bytes").replace("_", " "), *_figure(name, *pair))
        for name, pair in found["figures"].items()
    ]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    lines = [
        f"  {name.ljust(widths[0])}  {old.rjust(widths[1])} -> {new.ljust(widths[2])}  {delta}".rstrip()
        for name, old, new, delta in rows
    ]
    if not found["changes"]:
        return "\n".join([*lines, "The decisions are the same."])
    groups: dict[tuple[str, str, str], list[str]] = {}
    for path, (before, after) in found["changes"].items():
        groups.setdefault((shape_of(path), shape_of(before), shape_of(after)), []).append(path)
    for (_, _, _), paths in groups.items():
        before, after = found["changes"][paths[0]]
        lines.append(f"  - {ranges(paths) if paths[0] else '(the model)'}: {before} -> {after}")
    return "\n".join(lines)


def _figure(name: str, old: Any, new: Any) -> tuple[str, str, str]:
    if name.endswith("_bytes"):
        return format_bytes(old), format_bytes(new), _delta(old, new)
    if name.endswith("_seconds"):
        return format_seconds(old), format_seconds(new), _delta(old, new)
    if name.endswith("_flops"):
        return format_flops(old), format_flops(new), _delta(old, new)
    return str(old), str(new), ""


def _delta(old: float, new: float) -> str:
    return f"{100 * (new / old - 1):+.1f} %" if old else ""
