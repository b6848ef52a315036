"""Programs of the kinds in `../shared/failures`, by other mechanisms: they train after `fit` as they did without."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from tests.safety.helpers import fakes_left, square

DIM = 16


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Counted(Mlp):
    """Draws from an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 0.01 * next(self.numbers))


class Jacobian(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(self.up(row))[:2]))(x)
        return super().forward(x) + rows.sum(1)


class SparseInside(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(40)
        mixing = torch.sparse_coo_tensor(
            torch.stack([at, at.flip(0)]), self.values, (len(x), len(x)), check_invariants=False
        )
        return super().forward(x) + torch.sparse.mm(mixing, x)


class InferenceInside(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            scale = super().forward(x).mean()
        return super().forward(x) + scale.item()


class SavedOnHost(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


class Forces(Mlp):
    """Needs a gradient in its forward, of a graph of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x.detach().requires_grad_()
        energy = super().forward(inner).square().sum()
        (slope,) = torch.autograd.grad(energy, inner, create_graph=True)
        return super().forward(x) - 0.1 * slope


class PrivateGenerator(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.streams = [[torch.Generator().manual_seed(3)]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.01 * torch.randn(x.shape, generator=self.streams[0][0]))


class Swapped(Mlp):
    """Runs on a weight made on the way, put where its parameter was."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(4 * DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.up.weight
        del self.up.weight
        self.up.weight = weight + self.more
        try:
            return super().forward(x)
        finally:
            del self.up.weight
            self.up.weight = weight


class Remembered(Mlp):
    @functools.cached_property
    def table(self) -> torch.Tensor:
        return torch.arange(DIM).float().cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.table)


class Growing(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.detach()[:2]])[-5:]
        return super().forward(x) + self.seen.mean(0)


class FrozenInside(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        frozen = super().forward(x)
        for parameter in self.parameters():
            parameter.requires_grad_(True)
        return frozen + super().forward(x.detach())


class Bound(Mlp):
    """Its forward is a bound method in an instance attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.other

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * Mlp.forward(self, x)


class Spectral(Mlp):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.up)


class Complex(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * 1j
        return super().forward(torch.view_as_real(turned).flatten(-2)) + turned.conj().imag.repeat_interleave(2, -1)


class HandMasked(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        mask = torch.rand_like(x) > 0.5
        return torch.where(mask, made, made.new_zeros(())) * 0 + made.masked_fill(mask, 0.0) / 0.5


class Namespaces(Mlp):
    """Hands an object on and changes it."""

    def forward(self, x: Any) -> Any:
        held = x if isinstance(x, SimpleNamespace) else SimpleNamespace(x=x, calls=0)
        held.x, held.calls = super().forward(held.x), held.calls + 1
        return held


def last_of(output: Any, batch: Any) -> torch.Tensor:
    return square(output.x * output.calls, batch)


LOSSES: dict[type, Callable[..., torch.Tensor]] = {Namespaces: last_of}
CAUGHT = (Counted, Jacobian, SparseInside, InferenceInside, SavedOnHost, PrivateGenerator)
HELD = (*(Forces, Swapped, Remembered, Growing, FrozenInside, Bound, Spectral, Complex, HandMasked, Namespaces),)


def trained(model: nn.Module, batch: Any, loss: Any) -> list[Any]:
    torch.manual_seed(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        value = loss(model(*batch), batch)
        value.backward()
        losses.append(value.item())
        optimizer.step()
    return [losses, *map(torch.clone, model.parameters()), *map(torch.clone, model.buffers())]


def made(kind: type) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[kind() for _ in range(3)])


@pytest.mark.parametrize("kind", [*CAUGHT, *(pytest.param(k, marks=pytest.mark.slow) for k in HELD)])
@pytest.mark.slow
def test_a_model_trains_as_if_fit_had_not_been_called(kind: type) -> None:
    batch, loss = (torch.randn(96, DIM, generator=torch.Generator().manual_seed(1)),), LOSSES.get(kind, square)
    expected = trained(made(kind), copy.deepcopy(batch), loss)
    model = made(kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*took a step that its plan was not made for")  # ops in inference mode
        fitted = recoup.fit(model, batch, loss=loss, budget="min", timed=False)
        assert fitted.evidence.ok, fitted.evidence.differences
        assert fakes_left() == 0
        found = trained(model, batch, loss)
    for now, before in zip(found, expected, strict=True):
        assert torch.equal(now, before) if isinstance(now, torch.Tensor) else now == before


@pytest.mark.slow
def test_the_minimum_that_a_measured_overrun_names_works() -> None:
    """A step whose generator states or inner graphs are not predicted: `minimum_bytes` is of what was measured."""
    model, batch = made(Forces), (torch.randn(96, DIM),)
    with pytest.raises(recoup.InfeasibleBudget) as caught:
        recoup.fit(model, batch, loss=square, budget="30%", timed=False)
    budget = caught.value.minimum_bytes
    try:
        fitted = recoup.fit(model, batch, loss=square, budget=budget, timed=False)
    except recoup.InfeasibleBudget as error:
        assert error.minimum_bytes > budget, "the same minimum again"
        assert "measured" in str(error)
        fitted = recoup.fit(model, batch, loss=square, budget=error.minimum_bytes, timed=False)
    assert fitted.evidence.ok
