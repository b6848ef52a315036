"""Steps under autocast have programs; what autocast cast before, of weights changed since, is never made again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recoup.evidence.gradients import equal_values
from recoup.ir.decision import Decision, Rebuild, Rederive
from recoup.runtime.apply import apply_decisions

PLANS: list[Decision] = [Rederive(path=""), Rebuild(path="")]


class Net(nn.Module):
    """Layers, one of which is used twice if `is_shared`; autocast may be inside."""

    def __init__(self, *, is_shared: bool = False, is_inside: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.norm = nn.LayerNorm(64)
        self.is_shared, self.is_inside = is_shared, is_inside

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=True if self.is_inside else torch.is_autocast_enabled("cpu")
        ):
            for i in (0, 1, 2, 1) if self.is_shared else (0, 1, 2, 3):
                x = x + F.gelu(self.layers[i](self.norm(x)))
        return x.float().square().mean()


def _around_each(net: Net, step: Callable[[], None]) -> None:
    for _ in range(8):
        with torch.autocast("cpu", torch.bfloat16):
            step()


def _inside(net: Net, step: Callable[[], None]) -> None:
    net.is_inside = True
    for _ in range(8):
        step()


def _around_all(net: Net, step: Callable[[], None]) -> None:
    with torch.autocast("cpu", torch.bfloat16):  # casts stay: weights that a step changed are not read again
        for _ in range(8):
            step()


def _on_and_off(net: Net, step: Callable[[], None]) -> None:
    for i in range(10):
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 0):
            step()


def _without_cache(net: Net, step: Callable[[], None]) -> None:
    for i in range(8):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=i < 5):
            step()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.action)
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("loop", [_around_each, _inside, _around_all, _on_and_off, _without_cache])
def test_bits_are_those_of_plain(loop: Any, is_shared: bool, plan: Decision, programs: list[bool]) -> None:
    torch.manual_seed(0)
    net, x = Net(is_shared=is_shared), torch.randn(256, 64)
    twin = copy.deepcopy(net)
    found: list[list[Tensor]] = []
    for each in (net, twin):
        results: list[Tensor] = []
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)

        def step(
            each: Net = each, results: list[Tensor] = results, optimizer: torch.optim.Optimizer = optimizer
        ) -> None:
            loss = each(x)
            if len(results) % 2:
                loss = loss + each(x * 0.5)  # two forwards before one backward
            optimizer.zero_grad()
            loss.backward()
            results.extend([loss.detach(), *[p.grad.clone() for p in each.parameters() if p.grad is not None]])
            optimizer.step()

        if each is net:
            with apply_decisions(net, [plan]) as applied:
                loop(each, step)
            assert applied.log.num_rederived > 0
        else:
            loop(each, step)
        found.append(results)
    assert len(found[0]) == len(found[1])
    assert all(map(equal_values, *found))
    assert True in programs or loop is _around_all or is_shared


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.action)
def test_a_weight_changed_between_its_cast_and_its_use(plan: Decision) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(256, 64)
    twin = copy.deepcopy(net)
    grads = []
    for each, decisions in ((net, [plan]), (twin, [])):
        with apply_decisions(each, decisions):
            for i in range(8):
                each.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    if i > 4:
                        F.linear(x, each.layers[1].weight)  # outside of the planned forward
                        with torch.no_grad():
                            each.layers[1].weight.mul_(1.25)
                    loss = each(x)
                loss.backward()
            grads.append([p.grad for p in each.parameters()])
    assert all(map(equal_values, *grads))
