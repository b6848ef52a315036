"""Everything here runs on a CUDA GPU that is not there: values and times are not real, all else is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _reason() -> str:
    """Returns why these tests cannot run in this process; "" if they can."""
    if importlib.util.find_spec("stub") is None:
        return "runs on the stub GPU alone: `make check-cuda` builds it and runs this"
    import stub

    return "" if stub.is_active() else "this process was not started by the stub's run.sh: use `make check-cuda`"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _reason()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda_stub)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
