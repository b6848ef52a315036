"""Steps that save more than the planned one say so, whether or not they begin as a step that was recorded."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.cost.model import FlopsCost


class Cells(nn.Module):
    """An automaton: a mask whose graph nothing holds, and an update, so many times."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.act = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 4, 1)
        self.num, self.logs, self.logged = 4, False, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.num):
            x = (x + self.act(F.relu(self.see(x)))) * (F.max_pool2d(x[:, :1], 3, 1, 1) > 0.1)
        if self.logs:
            self.logged = float(F.relu(self.see(x)).square().mean().detach())
        return x


def _said(steps: Sequence[tuple[int, bool]], budget: str) -> list[list[str]]:
    """Returns what is said of a step that its plan was not made for, by step: (number of rounds, whether it logs)."""
    torch.manual_seed(0)
    model, x = Cells(), torch.rand(2, 4, 24, 24)
    given: dict[str, Any] = {"loss": lambda out, batch: out.square().mean()}
    plan = recoup.plan(model, x, budget=budget, cost=FlopsCost(), **given)
    assert type(plan.decisions[0]).__name__ == "Rebuild"
    found = []
    with recoup.apply(model, plan):
        for model.num, model.logs in steps:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(x).square().mean().backward()
            found.append([str(w.message) for w in caught if "its plan was not made for" in str(w.message)])
    return found


@pytest.mark.parametrize("before", [((4, False),), ((4, False), (4, False)), ((4, False), (3, False), (3, False))])
def test_more_rounds_than_planned_are_said(before: tuple[tuple[int, bool], ...]) -> None:
    *others, last = _said([*before, (5, False)], "min")
    assert not any(others) and len(last) == 1 and "autograd saves" in last[0]


def test_fewer_rounds_and_what_is_logged_are_not() -> None:
    assert not any(_said([(4, True), (4, False), (4, False), (3, False), (4, False), (3, True)], "min"))
