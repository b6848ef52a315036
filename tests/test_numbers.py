"""Every number at the top of a file, or of a class, says what it counts, and why it is what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "recoup"
# A word of these in a number's name says what it counts.
UNITS = """
    ANSWERS BLOCKS BYTES CALLS CELLS COLUMNS COPIES DEPTH ELEMENTS EPS EVALUATIONS EXAMPLES FACTOR FEMTOSECONDS
    FLOPS HZ LABELS LAYERS LEAVES LOOPS NAMES OBJECTS OPS PARTS PIECES PIXELS PLACES PLANS POINTS RATIO ROWS
    SECONDS SHARE SIZE SQUEEZES STEPS TAPES TENSORS TOKEN TOKENS TRIES TURNS UNITS VERSION WAYS WIDTH
"""
MOST_NUMBERS = 83  # of all files together: a new one has to be worth it


def _is_number(value: ast.expr) -> bool:
    if isinstance(value, ast.BinOp):
        return _is_number(value.left) and _is_number(value.right)
    if isinstance(value, ast.UnaryOp):
        return _is_number(value.operand)
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yields names that are assigned numbers, one by one or several at once, and where."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not any("Enum" in ast.unparse(base) for base in node.bases):
            # A constant of a class is a number as well; one in lower case is a default that instances change.
            yield from ((name, inside) for name, inside in _assigned(node.body) if name.isupper())
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=True))
        else:
            pairs = [(target, node.value)]
        yield from ((ast.unparse(name), node) for name, value in pairs if _is_number(value))


def _numbers(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the name of each number and what stands beside, above or below it in words."""
    text = path.read_text()
    lines = text.splitlines()
    body = ast.parse(text).body
    for name, node in _assigned(body):
        at = body.index(node) if node in body else len(body)
        after = body[at + 1] if at + 1 < len(body) else None
        is_below = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        _, _, beside = lines[node.lineno - 1].partition("  # ")
        above = lines[node.lineno - 2].strip()
        yield name, beside or (above if above.startswith("#") else "") or ("below" if is_below else "")


def test_numbers_have_units_and_reasons() -> None:
    num_numbers = 0
    for path in sorted(ROOT.rglob("*.py")):
        for name, why in _numbers(path):
            num_numbers += 1
            where = f"{path.relative_to(ROOT)}: {name}"
            assert set(name.strip("_").upper().split("_")) & set(UNITS.split()), f"{where} does not say what it counts"
            assert why, f"{where} has no reason beside it"
    assert num_numbers <= MOST_NUMBERS
