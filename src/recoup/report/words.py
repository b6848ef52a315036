"""A plan in model terms: which layers do what, ranges of equal layers said once."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recoup.ir.decision import Decision
from recoup.ir.plan import Plan
from recoup.units import format_bytes

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def describe(plan: Plan) -> list[str]:
    """Returns what the plan does, one line an action, e.g. `recompute model.layers.0-7`."""
    return describe_decisions(plan.decisions)


def kinds(decisions: Sequence[Decision]) -> list[list[Decision]]:
    """Returns the decisions that do something, by kind: regions of equal layers, all that rederive."""
    regions = [d for d in decisions if d.is_region]
    found = list(_region_kinds(regions).values())
    found += [[d] for d in decisions if d.scan is not None]
    for action in ("rederive", "tile", "offload"):
        for tile_of in ("loss", "module"):
            members = [d for d in decisions if d.action == action and d.tile_of == tile_of]
            if members:
                found.append(members)
    return found


def _region_kinds(regions: Sequence[Decision]) -> dict[tuple[str, ...], list[Decision]]:
    groups: dict[tuple[str, ...], list[Decision]] = {}
    for decision in regions:
        chunk = f"{decision.chunk} of {decision.calls}" if decision.chunk else ""
        offload = "offload" if decision.offload else ""
        key = (
            decision.inside,
            chunk,
            offload,
            ", ".join(decision.keep),
            *(shape_of(p) for p in (decision.path, *decision.span)),
        )
        groups.setdefault(key, []).append(decision)
    return groups


def describe_decisions(decisions: Sequence[Decision]) -> list[str]:
    """Returns what the decisions do, one line an action."""
    if not decisions:
        return ["nothing is changed"]
    root = next((d.action for d in decisions if d.path == "" and d.action in ("save", "rederive")), "save")
    regions = [d for d in decisions if d.is_region]
    lines = []
    for (inside, *_), members in _region_kinds(regions).items():
        text = ranges([d.path or "(the model)" for d in members])
        if members[0].span:
            through = members[0].span[-1]
            text += (
                f" through {_tail(members[0].path, through)}"
                if len(members) == 1
                else " each through " + _tail(members[0].path, through)
            )
        if members[0].chunk:
            text += f", {members[0].chunk} calls at a time"
        if members[0].calls:
            text += f", the first {members[0].calls} calls"
        if inside == "rederive":
            text += " (rederiving inside)"
        if members[0].keep:
            text += f", keeping {', '.join(members[0].keep)}"
        if members[0].offload:
            text += ", inputs offloaded"
        lines.append(f"recompute {text}")
    lines += [_scan_words(d, decisions) for d in decisions if d.scan is not None]
    for decision in decisions:
        if decision.action == "tile" and decision.tile_of == "loss":
            size = f" by {decision.tile_tokens} tokens" if decision.tile_tokens else ""
            lines.append(f"tile {decision.path} and its loss{size}")
    for tokens in dict.fromkeys(d.tile_tokens for d in decisions if d.tile_of == "module"):
        paths = [d.path or "(the model)" for d in decisions if d.tile_of == "module" and d.tile_tokens == tokens]
        lines += [f"tile {text} by {tokens} tokens" for text in _grouped(paths)]
    for inside in ("save", "rederive"):
        moved = [d.path or "(the model)" for d in decisions if d.action == "offload" and d.inside == inside]
        for text in _grouped(moved):
            lines.append(f"offload what is saved in {text}" + (", but what rederives" if inside == "rederive" else ""))
    for action in ("rederive", "save"):
        paths = [d.path for d in decisions if d.action == action and d.path]
        if root == action:
            is_alone = len(decisions) == 1 and decisions[0].action != "recompute"
            lines.append(f"{action} everywhere" if is_alone else f"{action} everywhere else")
        elif paths:
            for text in _grouped(paths):
                lines.append(f"{action} {text}")
    if root == "save" and not any(line.startswith("save") for line in lines):
        lines.append("save the rest")
    return lines


def _scan_words(decision: Decision, decisions: Sequence[Decision]) -> str:
    """Returns what is decided about a scan; which one it is, where its call runs several."""
    others = sum(d.scan is not None and (d.path, d.call) == (decision.path, decision.call) for d in decisions)
    which = f"scan {decision.scan}" if others > 1 or decision.scan else "the scan"
    call = "" if decision.call is None else f", call {decision.call}"
    where = decision.path or "(the model)"
    return f"recompute steps of {which} of {where}{call} in {format_bytes(decision.scan_bytes or 0)}"


def _grouped(paths: Sequence[str]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(shape_of(path), []).append(path)
    return [ranges(members) for members in groups.values()]


def shape_of(path: str) -> str:
    """Returns the path with its layer numbers as stars: equal layers have equal shapes."""
    return _NUMBER.sub("*", path)


def _tail(first: str, last: str) -> str:
    """Returns `last` without what it shares with `first`."""
    a, b = first.split("."), last.split(".")
    shared = 0
    while shared < min(len(a), len(b)) - 1 and a[shared] == b[shared]:
        shared += 1
    return ".".join(b[shared:])


def ranges(paths: Sequence[str]) -> str:
    """Returns paths of one shape with their numbers as ranges: `layers.0-3,7.mlp`."""
    if len(paths) == 1:
        return paths[0]
    split = [_NUMBER.findall(p) for p in paths]
    varying = [i for i in range(len(split[0])) if len({s[i] for s in split}) > 1] if split[0] else []
    if len(varying) != 1:
        return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
    numbers = sorted({int(s[varying[0]]) for s in split})
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    count = -1

    def replace(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return text if count == varying[0] else match.group()

    return _NUMBER.sub(replace, paths[0])
