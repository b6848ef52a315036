"""Published recipes, by planning alone."""

from __future__ import annotations

import pytest
from bench import recipes

BOUND = 0.07


@pytest.mark.parametrize("group", ["monet", "cut-cross-entropy"])
def test_the_planner_says_what_authors_measured(group: str) -> None:
    rows = recipes.GROUPS[group]()
    assert rows and all(abs(row.error) <= BOUND for row in rows), "\n".join(map(str, rows))


@pytest.mark.slow
def test_the_planner_says_what_diffusers_measured() -> None:
    pytest.importorskip("diffusers")
    rows = recipes.GROUPS["diffusers"]()
    assert len(rows) == 4 and all(abs(row.error) <= BOUND for row in rows), "\n".join(map(str, rows))
