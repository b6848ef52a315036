"""Equal layers of the module tree as one row each: `layers.0-31 (x32)`, their figures added up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from recoup.ir.decision.paths import ranges, shape_of
from recoup.ir.report import ModuleRow

_SUMS = ("plain_saved_bytes", "saved_bytes", "plain_peak_bytes", "peak_bytes", "extra_seconds", "forward_seconds")
_BYTES = _SUMS[:4]


@dataclasses.dataclass(slots=True)
class _Node:
    row: ModuleRow
    children: list[_Node] = dataclasses.field(default_factory=list)
    paths: list[str] = dataclasses.field(default_factory=list)

    def key(self) -> Any:
        """Returns a key that is equal for layers that differ only in number and in seconds."""
        row = self.row
        figures = tuple(getattr(row, name) for name in _BYTES)
        about = (shape_of(row.path), row.call, row.kind, shape_of(row.action), row.is_decided)
        return (about, figures, tuple(child.key() for child in self.children))


def fold_rows(rows: Sequence[ModuleRow]) -> list[ModuleRow]:
    """Returns the rows with equal siblings, and all that is inside of them, as one; sums stay what they were.

    Args:
        rows: in call order, each below the last one of a smaller depth.
    """
    top: list[_Node] = []
    open_nodes: list[_Node] = []
    for row in rows:
        node = _Node(row, paths=[row.path])
        del open_nodes[row.depth :]
        (open_nodes[-1].children if open_nodes else top).append(node)
        open_nodes.append(node)
    return [row for node in _folded(top) for row in _walk(node)]


def _folded(siblings: list[_Node]) -> list[_Node]:
    groups: dict[Any, list[_Node]] = {}
    for node in siblings:
        groups.setdefault(node.key(), []).append(node)
    return [_joined(group) for group in groups.values()]


def _joined(group: list[_Node]) -> _Node:
    """Returns one node for equal nodes, with their children merged the same way."""
    children = [_joined(list(alike)) for alike in zip(*(node.children for node in group), strict=True)]
    paths = [path for node in group for path in node.paths]
    sums = {name: sum(getattr(node.row, name) for node in group) for name in _SUMS}
    count = sum(node.row.count for node in group)
    row = dataclasses.replace(group[0].row, count=count, **sums)
    if count > 1:
        row = dataclasses.replace(row, path=ranges(paths), action=shape_of(row.action))
    return _Node(row, children=_folded(children), paths=paths)


def _walk(node: _Node) -> list[ModuleRow]:
    return [node.row, *(row for child in node.children for row in _walk(child))]
