"""BatchNorm under a plan by tensor: its result comes from the statistics that autograd keeps, bit for bit."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from recoup.ir.decision import OpMark, Rebuild
from recoup.runtime.apply import apply_decisions

CHANNELS = 24


class Block(nn.Module):
    def __init__(self, *, affine: bool, channels: int = CHANNELS) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels, affine=affine)
        self.last = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(torch.relu(self.norm(self.convolution(x))))


def step(model: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], collections.Counter[str]]:
    """Returns loss, gradients and buffers of a step, and how often each op ran in backward."""
    model.zero_grad(set_to_none=True)
    loss = model(x).square().sum()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss.backward()
    found = [loss.detach(), *[p.grad for p in model.parameters() if p.grad is not None], *model.buffers()]
    return [t.clone() for t in found], collections.Counter(event.name for event in profiler.events())


@pytest.mark.parametrize(
    ("affine", "channels", "layout", "is_frozen"),
    [
        (True, CHANNELS, torch.contiguous_format, False),
        (False, CHANNELS, torch.contiguous_format, False),
        (True, 1100, torch.contiguous_format, False),  # statistics as large as what is worth a rebuild
        (True, CHANNELS, torch.channels_last, False),
        (True, CHANNELS, torch.contiguous_format, True),
    ],
)
def test_a_result_comes_from_its_statistics(
    affine: bool, channels: int, layout: torch.memory_format, is_frozen: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(affine=affine, channels=channels) for _ in range(2)))
    x = torch.randn(2, 3, 10, 10).to(memory_format=layout)
    if is_frozen:
        model[0].norm.requires_grad_(False)
    plain = copy.deepcopy(model)
    held = ("0.convolution", "0.last", "1.convolution")
    marks = [OpMark(path=path, call=0, ordinal=0, op="aten.convolution.default", holds=True) for path in held]
    with apply_decisions(model, (Rebuild(path="", marks=tuple(marks)),)):
        for turn in range(7):  # recorded, then by a program
            mine, counts = step(model, x)
            theirs, _ = step(plain, x)
            assert all(map(torch.equal, mine, theirs))
            assert counts["aten::convolution"] == 0
            if turn > 2:  # until then the profiler counts twice what `OpFunction` looks at; backward begins with one
                assert counts["aten::native_batch_norm"] == counts["aten::ones_like"] - 1 == 2
    for mine_then, theirs_then in zip(step(model, x)[0], step(plain, x)[0], strict=True):
        assert torch.equal(mine_then, theirs_then)


def test_without_gradients_there_are_no_statistics_to_keep() -> None:
    torch.manual_seed(0)
    model, x = Block(affine=True), torch.randn(2, 3, 24, 24)
    model.convolution.requires_grad_(False)
    model.norm.requires_grad_(False)
    plain = copy.deepcopy(model)
    with apply_decisions(model, (Rebuild(path=""),)):
        for _ in range(7):
            assert all(map(torch.equal, step(model, x)[0], step(plain, x)[0]))
