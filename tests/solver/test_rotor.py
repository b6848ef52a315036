"""The solver against Rotor's optimum on heterogeneous chains."""

from __future__ import annotations

import numpy as np
import pytest

from recoup.solver.frontier import Solver

from .helpers import UNIT, random_chain
from .rotor import rotor_times

NUM_BUDGETS = 20


@pytest.mark.parametrize(("seed", "num_stages"), [(1, 10), (2, 20), (3, 30), (4, 40), (5, 60)])
def test_no_slower_than_rotor(seed: int, num_stages: int) -> None:
    """Rotor's actions and more: at most 0.5 % slower, and feasible wherever it is."""
    problem = random_chain(seed, num_stages)
    solver = Solver(problem)
    plain = solver.solve(10**12).peak_bytes
    times = rotor_times(problem, plain // UNIT)
    floor = int(np.argmax(np.isfinite(times))) * UNIT
    assert solver.leanest().peak_bytes <= floor
    for i in range(NUM_BUDGETS):
        budget = floor + (plain - floor) * i // NUM_BUDGETS
        solution = solver.solve(budget)
        assert solution.status == "optimal"
        assert solution.peak_bytes <= budget
        assert solution.extra_seconds <= 1.005 * times[budget // UNIT]
