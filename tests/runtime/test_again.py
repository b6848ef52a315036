"""Ops that run again as something cheaper give the same bits."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from recoup.ir.decision import Rebuild
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild.again import safe_softmax
from recoup.runtime.rebuild.cheap_ops import op_facts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [-1, 1])
def test_safe_softmax(dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 7, 9, dtype=dtype)
    causal = x.masked_fill(torch.ones(7, 9).triu(1).bool(), -math.inf)
    masked = causal.clone()
    masked[1, 2] = masked[2, :, 3] = -math.inf  # as a whole, along each dimension
    wrong = masked.clone()
    wrong[0, 0, 0], wrong[0, 1, 4], wrong[2, 5, 5] = math.nan, math.inf, math.nan
    for scores in (x, causal, masked, wrong, x[:, :0], x.transpose(0, 2)):
        theirs, mine = torch.ops.aten._safe_softmax.default(scores, dim), safe_softmax(scores, dim)
        assert mine.stride() == theirs.stride()
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))
        assert torch.equal(mine.signbit(), theirs.signbit()) or scores is wrong


class Attention(nn.Module):
    """With dropout, which on a CPU is made of ops."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).transpose(1, 3).unbind(2)
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1).transpose(1, 2).flatten(2)


def test_attention_with_a_row_that_is_masked_as_a_whole() -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 40, 32)
    mask = torch.ones(40, 40).tril().bool()

    def step(mask: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        model(x, mask).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    empty = mask.clone()
    empty[5] = False
    plain = step(mask), step(empty)
    with apply_decisions(model, (Rebuild(path=""),)):
        for _ in range(7):  # recorded, then by a program
            for found, expected in zip((step(mask), step(empty)), plain, strict=True):
                assert all(map(torch.equal, found, expected))


class Counting(TorchDispatchMode):
    """Counts calls of the fused attention."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **kwargs or {})


class Fused(nn.Module):
    """Attention without dropout, in several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 4, 8)).transpose(1, 3).unbind(2)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x


@pytest.mark.parametrize("lengths", [(40, 40, 40, 40), (40, 36, 52, 28, 44, 40)])
def test_attention_that_drops_nothing_runs_again(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = Fused()
    planned = copy.deepcopy(plain)
    with apply_decisions(planned, (Rebuild(path=""),)):
        for length in lengths:
            x = torch.randn(2, length, 32)
            nums = []
            for model in (plain, planned):
                model.zero_grad(set_to_none=True)
                with Counting() as counting:
                    model(x).square().sum().backward()
                nums.append(counting.num)
            gradients = [[p.grad for p in model.parameters()] for model in (plain, planned)]
            assert all(map(torch.equal, *gradients))
            assert nums == [len(plain.layers), 2 * len(plain.layers)]
            planned.zero_grad(set_to_none=True)
            planned(x).square().sum().backward()  # uncounted, as a program
            assert all(map(torch.equal, [p.grad for p in planned.parameters()], gradients[0]))


def test_attention_runs_again_by_what_it_drops() -> None:
    flash = op_facts(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
    efficient = op_facts(torch.ops.aten._scaled_dot_product_efficient_attention.default)
    q = torch.empty(0)
    assert flash.runs_again((q, q, q)) and flash.runs_again((q, q, q, 0.0, True))
    assert efficient.runs_again((q, q, q, None, True)) and efficient.runs_again((q, q, q, None, True, 0.0))
    assert not efficient.runs_again((q, q, q, None, True, 0.1))
    assert not flash.can_rerun and not op_facts(torch.ops.aten.native_dropout.default).runs_again((q, 0.0, True))
