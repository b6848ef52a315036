"""Small models and what is asked of every one of them: fit is exact, and leaves nothing behind."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import recoup
from recoup import _torch


class Block(nn.Module):
    """Norm, two linears, a residual."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks of one kind between two linears."""

    def __init__(self, block: Any = Block, depth: int = 4, dim: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(8, dim)
        self.blocks = nn.ModuleList([block(dim) for _ in range(depth)])
        self.last = nn.Linear(dim, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h)


def square(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """A loss."""
    return output.square().mean()


def fit(model: nn.Module, batch: Any, *, budget: int | str = "65%", **options: Any) -> recoup.Fit:
    """Fits, at the least budget there is if the one that is asked for is below it."""
    options = {"loss": square, "timed": False, **options}
    for _ in range(2):
        try:
            return recoup.fit(model, batch, budget=budget, **options)
        except recoup.InfeasibleBudget as error:
            budget = error.minimum_bytes
    return recoup.fit(model, batch, budget=budget, **options)


others: list[torch.Tensor] = []  # fake tensors that were there when a test began; see conftest.py


def all_fakes() -> list[torch.Tensor]:
    """Returns the fake tensors of this process, with those that wait for the collector."""
    kind = _torch._fake_tensor_class()
    return [t for t in gc.get_objects() if type(t) is kind]


def fakes_left() -> int:
    """Returns how many fake tensors there are that were not there when the test began."""
    known = {id(t) for t in others}
    if all(id(t) in known for t in all_fakes()):
        return 0
    gc.collect()  # a second in a process with a million objects: where something waits for it alone
    return sum(id(t) not in known for t in all_fakes())


def assert_trains_like(model: nn.Module, twin: nn.Module, batch: tuple[Any, ...], *, steps: int = 2) -> None:
    """Trains both by hand from the same random state and compares losses and weights bit for bit."""
    assert fakes_left() == 0
    losses = []
    for trained in (model, twin):
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        losses.append([])
        for _ in range(steps):
            optimizer.zero_grad()
            loss = square(trained(*batch), batch)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b), name
