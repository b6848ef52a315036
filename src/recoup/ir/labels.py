"""Names of tensors, modules and methods for people, equal layers said once."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def group_labels(items: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Returns (label, bytes), storages with one label summed, largest first; layer numbers count as one label."""
    sums: dict[str, list[int]] = {}
    for label, size in items:
        sums.setdefault(_NUMBER.sub(".*", label), []).append(size)
    grouped = [(f"{label} (x{len(sizes)})" if len(sizes) > 1 else label, sum(sizes)) for label, sizes in sums.items()]
    grouped.sort(key=lambda item: -item[1])
    return grouped


def paths_around(path: str) -> list[str]:
    """Returns a dotted path and those of the modules around it, the outermost first, without the model's own."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def method_key(path: str, method: str) -> str:
    """Returns a method of the module at a dotted path, as plans and labels name it: "encoder.embed()"."""
    return f"{path}.{method}()".lstrip(".")


def without_numbers(path: str) -> str:
    """Returns a dotted path with its layer numbers as stars: those of equal layers are one."""
    return _NUMBER.sub(".*", path)
