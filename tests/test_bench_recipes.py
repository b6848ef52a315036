"""Published recipes, by planning alone."""

from __future__ import annotations

import pytest
from bench import recipes

from tests.thorough import cases

BOUND = 0.07


@pytest.mark.parametrize("group", ["monet", "cut-cross-entropy"])
def test_the_planner_says_what_authors_measured(group: str) -> None:
    rows = recipes.GROUPS[group]()
    assert rows and all(abs(row.error) <= BOUND for row in rows), "\n".join(map(str, rows))


@pytest.mark.slow
@pytest.mark.parametrize("every", cases((0, 1, 2, 4), (2,)))
def test_the_planner_says_what_diffusers_measured(every: int) -> None:
    pytest.importorskip("diffusers")
    (row,) = recipes.diffusers_ltx((every,))
    assert abs(row.error) <= BOUND, row
