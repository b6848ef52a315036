"""A forward that keeps tensors outside of the model's attributes, and models with TorchScript in them."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import recoup
from tests.safety.helpers import Block, Net, assert_trains_like, fakes_left, fit, square
from tests.thorough import cases

GLOBAL: dict[int, torch.Tensor] = {}
SEEN: list[torch.Tensor] = []


def mask(n: int) -> torch.Tensor:
    return torch.full((n, n), -1e9).triu(1)


@functools.lru_cache
def unbounded(n: int) -> torch.Tensor:
    return mask(n)


@functools.lru_cache(maxsize=4)
def bounded(n: int) -> tuple[torch.Tensor, int]:
    return mask(n), n


def in_default(n: int, kept: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006  # what is tested
    return kept.setdefault(n, mask(n))


class Holder:
    __slots__ = ("table",)
    shared: torch.Tensor | None = None

    def __init__(self) -> None:
        self.table: dict[int, torch.Tensor] = {}

    def get(self, n: int) -> torch.Tensor:
        if n not in self.table:
            self.table[n] = mask(n)
        return self.table[n]

    @classmethod
    def of_class(cls, n: int) -> torch.Tensor:
        if cls.shared is None:
            cls.shared = mask(n)
        return cls.shared


def closure() -> Any:
    kept = None

    def get(n: int) -> torch.Tensor:
        nonlocal kept
        if kept is None:
            kept = mask(n)
        return kept

    return get


class Attention(nn.Module):
    how = ""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.block = Block(dim)
        self.holder = Holder()
        self.nested: dict[str, dict[int, torch.Tensor]] = {"masks": {}}
        self.closure = closure()

    def mask(self, n: int) -> torch.Tensor:
        ways: dict[str, Any] = {
            "lru_cache": unbounded,
            "bounded lru_cache": lambda n: bounded(n)[0],
            "global dict": lambda n: GLOBAL[n] if n in GLOBAL else GLOBAL.setdefault(n, mask(n)),
            "default argument": in_default,
            "class attribute": Holder.of_class,
            "object with slots": self.holder.get,
            "nested dict": lambda n: self.nested["masks"].setdefault(n, mask(n)),
            "closure": self.closure,
        }
        return ways[Attention.how](n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if Attention.how == "list of activations":
            SEEN.append(v)
            return self.block(x + v)
        return self.block(x + (q @ k.transpose(1, 2) / 6 + self.mask(x.shape[1])).softmax(-1) @ v)


WAYS = ["lru_cache", "bounded lru_cache", "global dict", "default argument", "class attribute", "object with slots"]
WAYS += ["nested dict", "closure", "list of activations"]


def forget() -> None:
    for cached in (unbounded, bounded):
        cached.cache_clear()
    for table in (GLOBAL, in_default.__defaults__[0], SEEN):  # type: ignore[index]
        table.clear()
    Holder.shared = None


def build() -> nn.Module:
    torch.manual_seed(0)
    return Net(Attention, depth=2)


@pytest.mark.slow
@pytest.mark.parametrize("how", cases(WAYS, list(WAYS)[::2]))
def test_what_a_forward_keeps_is_never_fake(how: str) -> None:
    Attention.how = how
    forget()
    model, batch = build(), (torch.randn(4, 24, 8),)
    recoup.plan(model, batch, loss=square, budget="95%")
    assert fakes_left() == 0
    assert type(square(model(*batch), batch)) is torch.Tensor
    forget()
    fitted = fit(model, batch, budget="95%")
    assert fitted.evidence.exact, fitted.evidence.differences
    forget()
    assert_trains_like(model, build(), batch)
    forget()


def test_what_was_kept_before_is_the_same_object() -> None:
    Attention.how = "global dict"
    forget()
    model, batch = build(), (torch.randn(4, 24, 8),)
    model(*batch)
    kept = GLOBAL[24]
    fit(model, batch, budget="95%")
    assert GLOBAL[24] is kept
    forget()


@torch.jit.script
def scripted_activation(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = x + bias
    return y * torch.tanh(y)


class EndsInScript(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + scripted_activation(self.linear(functional.silu(x)), self.bias)


class Nested(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = torch.jit.script(Block(dim))
        self.outer = Block(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x))


TORCHSCRIPT = {
    "scripted child": lambda: nn.Sequential(nn.Linear(8, 32), torch.jit.script(Block()), nn.Linear(32, 5)),
    "traced child": lambda: nn.Sequential(
        nn.Linear(8, 32), torch.jit.trace(Block(), torch.randn(4, 32)), nn.Linear(32, 5)
    ),
    "scripted deeper": lambda: Net(Nested, depth=2),
    "scripted function last in a block": lambda: Net(EndsInScript),
    "scripted buffers": lambda: nn.Sequential(nn.Linear(8, 32), torch.jit.script(nn.BatchNorm1d(32)), Block()),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", TORCHSCRIPT)
def test_torchscript_keeps_its_weights(name: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return TORCHSCRIPT[name]()

    model, batch = make(), (torch.randn(64, 8),)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert fit(model, batch, budget="95%").evidence.exact
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(v, after[k]) for k, v in before.items())
    assert_trains_like(model, make(), batch)


class Bare(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        try:
            return x + torch.tanh(self.down(functional.gelu(h)))
        except:  # noqa: E722  # what is tested
            return x + self.down(functional.relu(h))


class Renamed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(x).sin()
        except BaseException as error:
            raise ValueError("something went wrong") from error


class LooksAtData(Block):
    """Under fake tensors `item()` fails, and the fallback is a way that training never takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            scale = 1.0 if float(x.detach().abs().max()) > 0 else 2.0
        except Exception:
            return x
        return super().forward(x) * scale


@pytest.mark.parametrize("block", [Bare, Renamed, LooksAtData])
def test_a_model_may_catch_everything(block: Any) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Net(block, depth=2)

    model, batch = make(), (torch.randn(128, 8),)
    fitted = fit(model, batch, budget="80%", actions=("recompute",))
    assert fitted.evidence.exact, fitted.evidence.differences
    assert fitted.plan.predicted.plain_peak_bytes == pytest.approx(fitted.evidence.baseline_peak_bytes, rel=0.05)
    assert_trains_like(model, make(), batch)


def test_what_is_frozen_for_the_collector_is_searched_too() -> None:
    Attention.how = "lru_cache"
    forget()
    model, batch = build(), (torch.randn(4, 24, 8),)
    gc.collect()
    gc.freeze()
    recoup.plan(model, batch, loss=square, budget="95%")
    assert gc.get_freeze_count() > 0
    assert type(square(model(*batch), batch)) is torch.Tensor
    forget()
