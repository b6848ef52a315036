"""Every test that the feature table names exists, and every row names one or says that it is not built."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_named_test_exists() -> None:
    rows = [line for line in (ROOT / "docs" / "features.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 20
    for row in rows:
        named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", row)
        assert named or "not built" in row, row
        for file, function in named:
            assert file.rsplit("/", 1)[-1].startswith("test_"), f"pytest does not collect {file}"
            assert function in _tests_that_run(ROOT / file), f"{function} is no test of {file}, or never runs: {row}"


def _tests_that_run(file: Path) -> set[str]:
    """Returns the names of a file's tests that pytest collects and nothing skips whatever the machine."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            if not any(mark.startswith(("pytest.mark.skip(", "pytest.mark.xfail")) for mark in marks):
                found.add(node.name)
    return found
