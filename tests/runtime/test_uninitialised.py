"""Regions whose kernels hand out memory that they do not write."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from recoup.ir.decision import Recompute
from recoup.runtime.apply import apply_decisions
from recoup.runtime.recompute.uninitialised import Uninitialised


class _Leaky(nn.Module):
    """Its noise is `torch.empty` in evaluation, and is saved before it is drawn in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.rrelu = nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rrelu(self.rrelu(self.linear(x))).sin()


class _Ctc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logs = functional.log_softmax(self.linear(x), -1)
        targets = torch.arange(1, 19).reshape(2, 9)
        return functional.ctc_loss(logs, targets, torch.tensor([30, 30]), torch.tensor([9, 2]))


@pytest.mark.parametrize("inner", [_Leaky, _Ctc])
def test_what_no_kernel_wrote_is_no_difference(inner: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(8, 64), inner())
    x = torch.randn(30, 2, 8) if inner is _Ctc else torch.randn(64, 8)
    with apply_decisions(model, [Recompute(path="1")]):
        for i in range(4):
            loss = model(x).sum()
            junk = [torch.full((64 * 64,), float(i)) for _ in range(20)]  # what freed memory holds differs
            del junk
            loss.backward()


class _Drifts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(functional.rrelu(x)) * float(os.environ.get(_FACTOR, "1"))).sin()


_FACTOR = "RECOUP_TEST_FACTOR"  # nobody puts the environment back


def test_a_drift_beside_it_is_found_still(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 64), _Drifts())
    with apply_decisions(model, [Recompute(path="1")]):
        for factor in (1.0, 2.0):
            monkeypatch.delenv(_FACTOR, raising=False)
            loss = model(torch.randn(64, 8)).sum()
            monkeypatch.setenv(_FACTOR, str(factor))
            if factor == 1.0:
                loss.backward()
            else:
                with pytest.raises(RuntimeError, match="E206"):
                    loss.backward()


def _ran(overload: Any, *args: Any, num_results: int) -> list[int]:
    """Returns the positions of the results that count as not written; the op itself is not run."""
    results = tuple(torch.zeros(3) for _ in range(num_results))
    watch = Uninitialised()
    watch.note(overload, args, {}, results)
    return [i for i, result in enumerate(results) if watch.holds(result)]


def test_attention_leaves_the_random_state_only_without_dropout() -> None:
    q = torch.zeros(1, 1, 4, 8)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert _ran(efficient, q, q, q, None, True, 0.0, num_results=4) == [2, 3]
    assert _ran(efficient, q, q, q, None, True, 0.1, num_results=4) == []
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert _ran(flash, q, q, q, 0.0, num_results=9) == [6, 7]
    assert _ran(flash, q, q, q, 0.5, num_results=9) == [7]
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    assert _ran(cudnn, q, q, q, None, True, num_results=9) == [6, 7]


def test_memory_that_is_written_counts_again() -> None:
    watch = Uninitialised()
    one, other = torch.empty(4), torch.empty(4)
    for made in (one, other):
        watch.note(torch.ops.aten.empty.memory_format, ([4],), {}, made)
    watch.note(torch.ops.aten.fill_.Scalar, (one, 1.0), {}, one)
    assert not watch.holds(one)
    assert watch.holds(other[1:])
