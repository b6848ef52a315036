"""Everything here runs on a CUDA GPU that is not there: values and times are not real, all else is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cuda_stub)


@pytest.fixture(autouse=True)
def an_empty_cache() -> Iterator[None]:
    """A test's model is gone with it, and does not lie in a segment that a plan before it had cached.

    It would pin the whole of it. Nor do workspaces of cuBLAS, which the first product under a plan takes from what the
    plan has reserved.
    """
    import torch

    from recoup._torch import clear_cublas_workspaces

    before = torch.cuda.memory_allocated()
    yield
    gc.collect()
    clear_cublas_workspaces()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before, "something holds a test's tensors although the test is over"
