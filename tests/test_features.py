"""Every test that the feature table names exists, and every row names one or says that it is not built."""

from __future__ import annotations

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
            assert f"def {function}(" in (ROOT / file).read_text(), row
