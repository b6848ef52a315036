"""What ops and the host take is measured once a run, not by every test; and no test leaves one of torch's modes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _measurements(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.getbasetemp()
    shared = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root  # those of all workers lie in one directory
    os.environ.setdefault("RECOUP_CACHE_DIR", str(shared / "measurements"))  # for the processes that tests start, too


def _num_modes() -> int:
    if "torch" not in sys.modules:
        return 0
    import torch

    return int(torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack())


@pytest.fixture(autouse=True)
def _modes_as_before() -> Iterator[None]:
    before = _num_modes()
    yield
    assert _num_modes() == before, "the test left a torch mode on, which changes every test after it"
