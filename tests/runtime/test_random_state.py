"""Random streams are found to have moved, however little, and go back to where they were."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from recoup.runtime.recompute.rng_state import RandomState, _numpy_stream

DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "python": random.random,
    "python normal": lambda: random.gauss(0.0, 1.0),
    "numpy": lambda: np.random.rand(3).tolist(),
    "numpy normal": lambda: np.random.normal(),
    "numpy held back": lambda: np.random.standard_normal(3).tolist(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_stream_that_moved_goes_back(name: str) -> None:
    for _ in range(3):  # from wherever the last one left it: with and without a normal number held back
        state = RandomState([])
        first = DRAWS[name]()
        state.settle()
        assert not state.is_settled()
        with state.replayed():
            assert DRAWS[name]() == first
        after = DRAWS[name]()
        state.put()
        assert DRAWS[name]() == first
        assert DRAWS[name]() == after


def test_streams_that_stay_are_let_go() -> None:
    np.random.seed(5)
    for _ in range(2):
        state = RandomState([])
        state.settle()
        assert state.is_settled()
    assert _numpy_stream.state() is _numpy_stream.state()  # read in full once
    np.random.normal()  # its twin is held back now: the state is read in full
    state = RandomState([])
    state.settle()
    assert state.is_settled()


def test_numpy_seeded_inside() -> None:
    state = RandomState([])
    np.random.seed(11)
    state.settle()
    assert not state.is_settled()
    state.put()
    again = RandomState([])
    np.random.seed(11)
    again.settle()
    assert not again.is_settled()
