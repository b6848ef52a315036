"""What `make test` runs some of and `make test-thorough` runs all of: more cases of what some cases show already."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

IS_THOROUGH = bool(os.environ.get("RECOUP_THOROUGH"))


thorough = pytest.mark.skipif(not IS_THOROUGH, reason="`make test-thorough` runs it")


def cases(all_cases: Iterable[Any], always: Iterable[Any]) -> list[Any]:
    """Returns the cases for `parametrize`: those of `always` run in every whole run, the others if it is thorough."""
    kept, listed = list(always), list(all_cases)
    assert all(case in listed for case in kept), kept
    return [case if case in kept else pytest.param(case, marks=(pytest.mark.slow, thorough)) for case in listed]
