"""Ops measured in a process that may die."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from recoup.cost import cache
from recoup.cost.apart import Request, measure_apart
from recoup.cost.kernel_flags import KernelFlags
from tests.cost.helpers import signature_of

aten = torch.ops.aten
_DEADLY = """
import os
from recoup.cost import measured, worker
run = worker.measure_ops
def deadly(signatures, *rest):
    if signatures[0].name == "aten.tanh.default":
        os.abort()
    return run(signatures, *rest)
worker.measure_ops = deadly
worker.main()
"""


@pytest.mark.slow
def test_an_op_that_ends_the_process_is_left_out_and_the_others_are_measured() -> None:
    x = torch.rand(64, 64)
    signatures = (
        signature_of(aten.mm.default, x, x),
        signature_of(aten.tanh.default, x),
        signature_of(aten.exp.default, x),
    )
    request = Request(device="cpu", flags=KernelFlags.current(), signatures=signatures, seconds=20.0)
    found = measure_apart(request, command=(sys.executable, "-c", _DEADLY))
    assert found.deadly == [1] and not found.failure
    assert set(found.measured) == {0, 2}
    assert all(m is not None and m.seconds > 0 for m in found.measured.values())


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why() -> None:
    request = Request(device="cpu", flags=KernelFlags.current(), signatures=(), seconds=20.0)
    x = signature_of(aten.exp.default, torch.rand(8, 8))
    for_one = Request(device="cpu", flags=request.flags, signatures=(x,), seconds=20.0)
    found = measure_apart(for_one, command=(sys.executable, "-c", "raise SystemExit('no memory for a context')"))
    assert found.failure == "no memory for a context" and not found.measured


def test_flags_that_change_kernels_have_a_cache_of_their_own() -> None:
    def path() -> Path:
        return cache.cache_path("card", threads=1, torch_version="2.13", flags=str(KernelFlags.current()))

    before, precision = path(), torch.get_float32_matmul_precision()
    paths = [before]
    try:
        torch.set_float32_matmul_precision("high")
        paths.append(path())
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.benchmark = True
        paths.append(path())
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
        paths.append(path())
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(False)
    assert len(set(paths)) == 4 and path() == before
