"""Forwards that are no plain methods, models that lose children, `use_cache` given in any way: as the plain model."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from recoup.ir.decision import Recompute, Rederive
from recoup.runtime import kv_cache
from recoup.runtime.apply import apply_decisions
from recoup.runtime.patch import find_patch


class Static(nn.Module):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


class OfClass(nn.Module):
    slope = 0.3

    @classmethod
    def forward(cls, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.leaky_relu(x, cls.slope)


class Inherited(Static):
    pass


class Partial(nn.Module):
    forward = functools.partial(torch.nn.functional.elu, alpha=0.5)  # type: ignore[assignment]


class ByName(nn.Module):
    """Its class's forward is one of its base's, bound where Python looks it up."""

    def _scaled(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return torch.tanh(x * scale)

    forward = _scaled


KINDS = [Static, OfClass, Inherited, Partial, ByName]


def _net(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), kind(), nn.Linear(8, 8), kind())


def _gradients(net: nn.Module) -> list[torch.Tensor]:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_called_as_python_would(kind: type[nn.Module]) -> None:
    expected = _gradients(_net(kind))
    net = _net(kind)
    plan = [Recompute(path="1"), Rederive(path="3")]
    with apply_decisions(net, plan):
        twin = copy.deepcopy(net)
        for found in (_gradients(net), _gradients(twin)):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        with torch.no_grad():
            assert net(torch.ones(2, 6)).shape == (2, 8)
    assert "forward" not in net[1].__dict__


@pytest.mark.parametrize("kept", [False, True])
def test_remove_after_a_child_was_replaced(kept: bool) -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
    applied = apply_decisions(net, [Recompute(path=str(i)) for i in range(4)])
    old = net[1] if kept else None
    net[1] = nn.Linear(4, 4)
    del net[3]
    applied.remove()
    assert not any("forward" in m.__dict__ for m in net.modules())
    if old is not None:
        assert find_patch(old) is None and "forward" not in old.__dict__
    net(torch.ones(1, 4)).sum().backward()


class _Config:
    use_cache = True


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = _Config()
        self.layer = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, mask: Any = None, use_cache: bool | None = None) -> torch.Tensor:
        self.seen.append(use_cache)
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((None, True), {}), ((None,), {"use_cache": True}), ((), {"use_cache": None})]
)
def test_use_cache_is_off_however_it_was_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    model = Decoder()
    with apply_decisions(model, [Recompute(path="layer")]):
        model(torch.ones(2, 4), *args, **kwargs)
    assert model.seen == [False]


def test_a_recurrent_cache_is_kept() -> None:
    """With a cache, convolutions of a state-space layer take another path, which rounds differently."""
    model = nn.Sequential(Decoder())
    model.config = _Config()  # type: ignore[assignment]
    model[0]._is_stateful = True  # type: ignore[assignment]
    modules = dict(model.named_modules())
    assert kv_cache.caching_paths(modules, ["0.layer"]) == set()
    model[0]._is_stateful = False  # type: ignore[assignment]
    assert kv_cache.caching_paths(modules, ["0.layer"]) == {"0"}
