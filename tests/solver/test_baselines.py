"""What people do by hand, as choices."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.solver.baselines import Pricer, baselines, choice_of, named_segments, repeated_blocks
from recoup.solver.reference import evaluate_line
from recoup.solver.sequence import Choice, Line
from recoup.solver.ways import Replay

from .helpers import random_chain, random_problem


def regions(choice: Choice) -> list[tuple[int, int]]:
    """Returns (first leaf, number of calls) of each region."""
    return [(pick.first, pick.num_calls) for pick in choice if pick.way == Replay()]


def test_names_and_regions_of_a_chain() -> None:
    found = {b.name: b for b in baselines(random_chain(1, 9))}
    assert list(found) == ["none", "full", *(f"every-{k}" for k in range(2, 10)), "sqrt"]
    assert regions(found["none"].choice) == []
    assert regions(found["full"].choice) == [(i, 1) for i in range(9)]
    assert regions(found["every-4"].choice) == [(0, 1), (4, 1), (8, 1)]
    assert regions(found["sqrt"].choice) == [(0, 3), (3, 3)]
    assert found["sqrt"].has_spans and not found["full"].has_spans


def test_repeated_blocks_are_the_siblings_that_save_most() -> None:
    blocks = repeated_blocks(Line(random_chain(3, 5)))
    assert [call.block.path for call in blocks] == ["0", "1", "2", "3", "4"]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9))
def test_the_quick_price_is_evaluates(seed: int) -> None:
    for problem in (random_problem(seed, num_blocks=8), random_chain(seed, 8)):
        line = Line(problem)
        pricer = Pricer(line)
        for _, segments in named_segments(line):
            peak, seconds, _ = evaluate_line(line, choice_of(line, segments))
            assert pricer.price(segments) == (peak, pytest.approx(seconds))
