"""Nothing at the top of a file changes while the package runs, but for what is named here with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "recoup"
_CHANGES = {
    "append",
    "appendleft",
    "add",
    "update",
    "setdefault",
    "pop",
    "popitem",
    "clear",
    "extend",
    "insert",
    "remove",
}
ALLOWED = {
    "_torch.py: _hooks_on": "mirrors torch's own list of hooks, under a lock",
    "runtime/execution_context.py: _activity": "of each thread: what autograd runs has no argument to carry it",
    "runtime/rebuild/cheap_ops.py: _facts": "a cache of facts about overloads, looked up for every op",
    "runtime/rebuild/lineage.py: current": "of each thread: what autograd packs has no argument to carry it",
    "runtime/scan_bytes.py: _scans": "of each thread: what plan and scan tell each other across the user's code",
    "runtime/tile/module/tiled.py: _proofs": "facts about modules that are alive, proved again if lost",
}


def _changed(tree: ast.Module) -> Iterator[str]:
    """Yields the names at the top of a file that functions rebind, or whose contents they change."""
    top = set()
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        top |= {t.id for t in targets if isinstance(t, ast.Name)}
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    for node in (inside for function in functions for inside in ast.walk(function)):
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            if isinstance(node.func.value, ast.Name) and node.func.value.id in top:
                yield node.func.value.id
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            for target in [node.target] if isinstance(node, ast.AugAssign) else node.targets:
                owner: ast.expr = target
                while isinstance(owner, ast.Subscript | ast.Attribute):
                    owner = owner.value
                if owner is not target and isinstance(owner, ast.Name) and owner.id in top:
                    yield owner.id


def test_no_file_keeps_state_that_changes() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in ROOT.rglob("*.py")
        for name in _changed(ast.parse(path.read_text()))
    }
    assert found == set(ALLOWED)


def test_the_search_finds_each_way_to_change_a_name() -> None:
    ways = (
        "    global a\n    a = 1",
        "    a.append(1)",
        "    a[0] = 1",
        "    a.b += 1",
        "    del a[0]",
        "    a.b[0] = 1",
    )
    for way in ways:
        assert list(_changed(ast.parse(f"a = f()\ndef g():\n{way}\n"))) == ["a"], way
    assert not list(_changed(ast.parse("a = f()\ndef g(b):\n    a = 1\n    b[0] = 1\n"))), "a local of the same name"
