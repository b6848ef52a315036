"""Fake tensors that other tests of this process keep are not those a test of this folder looks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.safety import helpers


@pytest.fixture(autouse=True)
def _fakes_of_others() -> Iterator[None]:
    helpers.others.extend(helpers.all_fakes())
    yield
    helpers.others.clear()
