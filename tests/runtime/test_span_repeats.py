"""A span that calls one module several times: the pool of a U-Net, a shared activation."""

from __future__ import annotations

import torch
from torch import nn

from recoup.ir.decision import Recompute
from recoup.runtime.apply import apply_decisions


class _Halving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
        self.third = nn.Conv1d(4, 4, 3, padding=1)
        self.pool = nn.MaxPool1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.third(self.pool(self.second(self.pool(self.first(x).tanh())))).tanh())


def test_a_module_called_twice_in_a_span_runs_as_often_in_its_replay() -> None:
    torch.manual_seed(0)
    model, x = _Halving(), torch.randn(2, 2, 16)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    handle = model.pool.register_forward_hook(count)
    for span in (("pool", "second", "pool"), ("pool", "second", "pool", "third")):
        model.zero_grad()
        calls = 0
        with apply_decisions(model, (Recompute(path="first", span=span),)):
            output = model(x)
            assert calls == 3
            output.sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
    handle.remove()
