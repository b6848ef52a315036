"""Kernels that give the same bits each time: some add in any order otherwise (atomics)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from recoup import _torch


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Runs the block with kernels that give the same bits each time; an op that has none raises."""
    before, benchmark = _torch.deterministic_mode(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it would choose among kernels by the clock
    try:
        yield
    finally:
        _torch.set_deterministic_mode(before)
        torch.backends.cudnn.benchmark = benchmark


def is_without_deterministic_kernel(error: Exception) -> bool:
    """Whether an op raised because it has no such kernel, or cuBLAS was not set up for them."""
    return isinstance(error, RuntimeError) and "use_deterministic_algorithms" in str(error)
