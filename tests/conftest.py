"""What ops and the host take is measured once a run: neither by every test, nor read from the user's own cache."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _measurements(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.getbasetemp()
    shared = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root  # those of all workers lie in one directory
    os.environ.setdefault("RECOUP_CACHE_DIR", str(shared / "measurements"))  # for the processes that tests start, too
