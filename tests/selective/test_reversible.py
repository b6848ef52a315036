"""`ReversibleSequential` against the plain run of the same blocks, and against checkpointing on memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recoup.errors import ReplayError, UsageError
from recoup.evidence.memory import measure_peak
from recoup.selective import ReversibleSequential


def _half(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def _stack(depth: int, width: int = 8, *, dropout: float = 0.0) -> ReversibleSequential:
    torch.manual_seed(0)
    return ReversibleSequential((nn.Sequential(_half(width), nn.Dropout(dropout)), _half(width)) for _ in range(depth))


def _gradients(model: ReversibleSequential, x: torch.Tensor, *, plain: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    x = x.clone().requires_grad_()
    (model.plain_forward(x) if plain else model(x)).square().mean().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_within_the_stated_tolerance(dtype: torch.dtype, tolerance: float, dropout: float) -> None:
    model = _stack(8, dropout=dropout).to(dtype)
    x = torch.randn(16, 16, dtype=dtype)
    for a, b in zip(_gradients(model, x, plain=True), _gradients(model, x, plain=False), strict=True):
        assert (a - b).norm() <= tolerance * a.norm()


def test_its_activations_do_not_grow_with_depth() -> None:
    def activations(depth: int, plain: bool) -> int:
        model, x = _stack(depth, 32), torch.randn(2048, 64)
        model.zero_grad()
        run = (lambda: model.plain_forward(x).mean().backward()) if plain else (lambda: model(x).mean().backward())
        gradients = sum(p.numel() * 4 for p in model.parameters())
        return measure_peak(run, device=torch.device("cpu"), held_bytes=0) - gradients

    assert activations(12, False) <= 1.1 * activations(3, False)
    assert activations(12, True) >= 3 * activations(3, True)


def test_gradcheck() -> None:
    model = _stack(2, 2).double()
    assert torch.autograd.gradcheck(model, (torch.randn(3, 4, dtype=torch.float64, requires_grad=True),))


def test_bad_input_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one pair"):
        ReversibleSequential([])
    with pytest.raises(UsageError, match="must be a pair"):
        ReversibleSequential([(nn.Linear(2, 2),)])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="running statistics"):
        ReversibleSequential([(nn.BatchNorm1d(2), nn.Linear(2, 2))])
    with pytest.raises(UsageError, match="must be even"):
        _stack(1)(torch.randn(2, 15))
    model = _stack(1)
    loss = model(torch.randn(2, 16)).sum()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(ReplayError, match="changed between"):
        loss.backward()
