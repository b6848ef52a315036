"""A dropout mask is kept as bytes only where its product shows it, whatever the numbers are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import recoup
from recoup.runtime.rebuild.kept import KeptCompact

SHAPE = (64, 64)
SCALES = [0.0, -0.0, 1.0, -2.5, 1e-3, 1e-8, 1e-40, 5e-324, 1e38, 1e300, float("inf"), float("-inf"), float("nan")]


def _outcome(
    step: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, rederive: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(SHAPE, dtype=dtype, requires_grad=True)
    if rederive:
        with recoup.rederive():
            loss = step(x)
    else:
        loss = step(x)
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


def _same(step: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32) -> bool:
    plain, ours = _outcome(step, dtype, False), _outcome(step, dtype, True)
    return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(plain, ours, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("way", ["mul", "div", "in place", "both"])
def test_every_scale(dtype: torch.dtype, way: str) -> None:
    for scale in SCALES:

        def step(x: torch.Tensor, scale: float = scale) -> torch.Tensor:
            mask = torch.empty_like(x).bernoulli_(0.5)
            if way == "in place":
                noise = torch.empty_like(x).bernoulli_(0.5).div_(scale or 0.5)
            else:
                noise = mask / (scale or 0.5) if way == "div" else mask * scale
            if way == "both":
                noise = noise / 3
            return (x + x * noise + x.sigmoid() * mask).float().square().mean()

        assert _same(step, dtype), (scale, way)


def _part(x: torch.Tensor) -> torch.Tensor:
    mask = torch.full_like(x, 3.0)
    mask[:, :40].bernoulli_(0.5)
    return (x * (mask * 2) + x.sin() * mask).square().mean()


def _transposed(x: torch.Tensor) -> torch.Tensor:
    mask = torch.empty_like(x).bernoulli_(0.5)
    return (x * (mask.t() * 2) + x.sin() * mask).square().mean()


def _strided(x: torch.Tensor) -> torch.Tensor:
    mask = torch.empty(64, 128).bernoulli_(0.5)
    return (x * (mask[:, ::2] * 2) + x.sin() * mask[:, 1::2]).square().mean()


def _written_after(x: torch.Tensor) -> torch.Tensor:
    mask = torch.empty_like(x).bernoulli_(0.5)
    mask[0] = 5.0
    return (x * (mask * 2) + x.sin() * mask).square().mean()


def _by_a_tensor(x: torch.Tensor) -> torch.Tensor:
    mask = torch.empty_like(x).bernoulli_(0.5)
    return (x * (mask * torch.zeros_like(x)) + x.sin() * mask).square().mean()


def _rounded(x: torch.Tensor) -> torch.Tensor:
    mask = torch.empty_like(x).bernoulli_(0.5)
    return (x * torch.div(mask, 3.0, rounding_mode="floor") + x.sin() * mask).square().mean()


@pytest.mark.parametrize("step", [_part, _transposed, _strided, _written_after, _by_a_tensor, _rounded])
def test_masks_of_other_kinds(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert _same(step)


def test_a_mask_that_shows_is_kept_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    init = KeptCompact.__init__
    monkeypatch.setattr(KeptCompact, "__init__", lambda self, *a: (made.append(1), init(self, *a))[1])

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.1).square().sum()

    assert _same(step)
    assert made


@pytest.mark.parametrize("dtype", [torch.cfloat, torch.cdouble])
@pytest.mark.parametrize("lay", ["transposed", "sliced", "dense"])
def test_complex_tensors_and_their_real_views(dtype: torch.dtype, lay: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        c = torch.complex(x, x.sin()).to(dtype)
        c = {"transposed": c.t(), "sliced": c[:, ::2], "dense": c}[lay] * 1.5
        t = (c @ c.conj().transpose(0, 1)) * 0.01
        real = torch.view_as_real(c)
        real = real * real.sin()
        return (real.sum() + t.real.square().mean() + c.abs().sum()).float()

    assert _same(step)
