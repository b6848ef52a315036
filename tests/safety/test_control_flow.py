"""`torch.cond` in a forward: where a mode was on that forbids compiling, Dynamo skips it for good."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import recoup
from tests.safety import helpers
from tests.safety.helpers import Block, Net, assert_trains_like, fit
from tests.thorough import thorough


class Branches(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)
        self.block = Block(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.cond(x.sum() > 0, lambda t: self.left(t).tanh(), lambda t: self.right(t) * 2, (x,))
        return self.block(x + h.unflatten(-1, (2, -1)).sum(-2))


class Root(nn.Module):
    """The model's own forward ends in the branches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: self.net(t) * 2, lambda t: self.net(t), (x,))


CASES = [
    pytest.param(Root, "1MiB", id="root", marks=thorough),
    pytest.param(lambda: Net(Branches, depth=1), "85%", id="inside"),
]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
@pytest.mark.parametrize(("make", "budget"), CASES)
@pytest.mark.slow
def test_branches_have_gradients_during_and_after_fit(make: Any, budget: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    model, batch = make(), (torch.randn(256, 8),)
    fitted = fit(model, batch, budget=budget, actions=("rederive", "recompute"))
    assert fitted.evidence.exact, fitted.evidence.differences
    fitted.applied.remove()
    assert model(*batch).requires_grad
    with recoup.rederive():
        assert model(*batch).requires_grad
    helpers.others.extend(helpers.all_fakes())  # Dynamo holds some, with and without recoup
    torch.manual_seed(1)
    assert_trains_like(model, make(), batch)
