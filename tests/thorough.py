"""What `make test` runs some of and `make test-thorough` runs all of: more cases of what some cases show already."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

IS_THOROUGH = bool(os.environ.get("RECOUP_THOROUGH"))


def cases(names: Iterable[Any], always: Iterable[Any]) -> list[Any]:
    """Returns the cases for `parametrize`: those of `always` run in every whole run, the others if it is thorough."""
    kept, names = set(always), list(names)
    assert kept <= set(names), kept - set(names)
    skip = pytest.mark.skipif(not IS_THOROUGH, reason="`make test-thorough` runs it")
    return [name if name in kept else pytest.param(name, marks=(pytest.mark.slow, skip)) for name in names]
