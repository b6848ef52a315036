"""Module paths for people: equal layers said once, `layers.0-7.mlp`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from recoup.thresholds import MOST_NAMES

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def shape_of(path: str) -> str:
    """Returns the path with its layer numbers as stars: equal layers have equal shapes."""
    return _NUMBER.sub("*", path)


def grouped(paths: Sequence[str]) -> list[str]:
    """Returns paths with those of one shape in one text each."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(shape_of(path), []).append(path)
    return [ranges(members) for members in groups.values()]


def tail(first: str, last: str) -> str:
    """Returns `last` without the prefix that it shares with `first`."""
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
        return listed(paths)
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


def listed(names: Sequence[str]) -> str:
    """Returns the first names, and of how many others there are: "a, b and 7 more"."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
