"""Whether the modules of a region are as they were: attributes, parameters, children, hooks, told by their tables.

Python counts the changes of each dictionary (`_torch.dict_version`), whoever makes them and by whatever way. While the
counts of all tables of all modules stay, each name stands for the object that it stood for, and nothing has to be
compared. Where one differs, the tables are looked through name by name, as they are where nobody counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from recoup import _torch

Versions = list[int]


class Tables:
    """The tables of some modules.

    Args:
        modules: (path, module) pairs, as `module_state.walk` returns them; only weakly held.
        empty: containers among their attributes that have to stay empty.
    """

    __slots__ = ("_empty", "_paths", "_refs")

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], empty: Sequence[Any]) -> None:
        self._paths = [path for path, _ in modules]
        self._refs = [weakref.ref(module) for _, module in modules]
        self._empty = empty

    def modules(self) -> list[tuple[str, Any]]:
        """Returns the (path, module) pairs; None in the place of a module that was freed."""
        return [(path, ref()) for path, ref in zip(self._paths, self._refs, strict=True)]

    def are_of(self, module: nn.Module) -> bool:
        """Whether this is the first of the modules, below which the others were found."""
        return self._refs[0]() is module

    def versions(self) -> Versions | None:
        """Returns numbers that differ once a table has changed; None where they cannot tell."""
        count = _torch.dict_version()
        if count is None:
            return None
        found: Versions = []
        for ref in self._refs:
            module = ref()
            if module is None:
                return None
            table = module.__dict__
            parameters, children = table.get("_parameters"), table.get("_modules")
            if type(parameters) is not dict or type(children) is not dict:  # of a ScriptModule
                return None
            found += (count(table), count(parameters), count(children))
        return None if any(self._empty) else found


class Standing:
    """What a region noted of its modules in an earlier step, taken again while the tables are as they were.

    Attributes:
        versions: of the tables, when it was last looked at.
        attributes: the note, an `AttributeState`; it holds no tensor.
    """

    __slots__ = ("attributes", "tables", "versions")

    def __init__(self, tables: Tables, versions: Versions | None, attributes: Any) -> None:
        self.tables = tables
        self.versions = versions
        self.attributes = attributes
