"""Every error has a code, every code a page, and every page an error."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from recoup import errors

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "errors"
CLASSES = [
    c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, (errors.RecoupError, UserWarning))
]


def _raised_codes() -> set[str]:
    """Returns the codes that are passed where errors are made in the source."""
    found = set()
    for file in (ROOT / "src").rglob("*.py"):
        if file.name == "errors.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in errors.CODES:
                found.add(node.value)
    return found


def test_every_code_has_a_page_and_every_page_a_code() -> None:
    pages = {p.stem for p in PAGES.glob("E*.md")}
    assert pages == set(errors.CODES)
    index = (PAGES / "README.md").read_text()
    for code, title in errors.CODES.items():
        text = (PAGES / f"{code}.md").read_text()
        assert text.startswith(f"# {code}: {title}\n")
        assert "**For instance**" in text and "**What to do**" in text
        assert f"| [{code}]({code}.md) | {title} |" in index


def test_every_class_has_a_code_and_every_code_is_used() -> None:
    used = {c.code for c in CLASSES} | _raised_codes()
    assert used == set(errors.CODES)
    own = [c.code for c in CLASSES if "code" in c.__dict__ and c is not errors.RecoupError]
    assert len(own) == len(set(own))  # two classes never share one


def test_every_replay_error_says_which() -> None:
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ReplayError":
                assert any(k.arg == "code" for k in node.keywords), f"{file}:{node.lineno}"


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_a_message_ends_with_its_code(error: type) -> None:
    if issubclass(error, Warning):
        return
    extra = {"budget_bytes": 1, "minimum_bytes": 2, "phase": "forward", "tensors": ()}
    made = error("What.", **(extra if error is errors.InfeasibleBudget else {}))
    assert str(made) == f"What. [{error.code}]"
