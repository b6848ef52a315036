"""Networks over time, and the plain loop they are compared with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from recoup.recurrent import ScanReport, scan


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (v,) = ctx.saved_tensors
        return gradient / (1 + 10 * v.abs()) ** 2


class Gru(nn.Module):
    """The state is the output: its loss term is part of the state's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(5, 7)

    def step(self, h: Any, x: torch.Tensor) -> Any:
        h = self.cell(x, h)
        return h, h


class LstmDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out, self.drop = nn.LSTMCell(5, 7), nn.Linear(7, 3), nn.Dropout(0.3)

    def step(self, state: Any, x: torch.Tensor) -> Any:
        h, c = self.cell(x, state)
        return (h, c), self.drop(self.out(h))


class TiedNorm(nn.Module):
    """A weight used three times a step, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.into, self.norm = nn.Parameter(torch.randn(7, 7) * 0.3), nn.Linear(5, 7), nn.BatchNorm1d(7)

    def step(self, h: Any, x: torch.Tensor) -> Any:
        h = torch.tanh(self.norm(self.into(x)) + h @ self.w + torch.sin(h) @ self.w.t())
        return h, h @ self.w


class Attribute(nn.Module):
    """A potential and a counter in attributes; None before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(5, 7), nn.Linear(7, 7)
        self.v: Any = None
        self.count = 0

    def step(self, state: Any, x: torch.Tensor) -> Any:
        if self.v is None:
            self.v = torch.zeros(x.shape[0], 7)
        self.v = 0.9 * self.v * torch.sigmoid(self.v) + self.into(x) + 0.1 * self.back(self.v)
        self.count += 1
        return state, torch.tanh(self.v)


class Lif(nn.Module):
    """Two layers of leaky integrate-and-fire neurons with a learnable decay."""

    def __init__(self, hidden: int = 16, inputs: int = 5) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, 3)
        self.decay = nn.Parameter(torch.tensor(0.9))

    def step(self, state: Any, x: torch.Tensor) -> Any:
        u, v = state
        u = self.decay * u + self.first(x)
        spikes = Spike.apply(u - 1)
        u = u - spikes
        v = self.decay * v + self.second(spikes)
        return (u, v), Spike.apply(v - 1)


NETWORKS = {
    "gru": (Gru, (7,)),
    "lstm-dropout": (LstmDropout, (7, 7)),
    "tied-norm": (TiedNorm, (7,)),
    "attribute": (Attribute, ()),
    "lif": (Lif, (16, 3)),
}


def plain(step: Any, inputs: torch.Tensor, state: Any, outputs: str = "stack") -> tuple[Any, torch.Tensor]:
    total = None
    ys = []
    for x in inputs:
        state, y = step(state, x)
        total = y if total is None else total + y
        ys.append(y)
    if outputs == "stack":
        return state, torch.stack(ys)
    return state, {"sum": total, "mean": total / len(ys), "last": ys[-1]}[outputs]


def train_once(
    network: nn.Module, sizes: tuple[int, ...], num_steps: int, options: dict[str, Any] | None, outputs: str = "stack"
) -> tuple[list[Any], ScanReport]:
    """Returns everything a training step leaves behind, by the plain loop if `options` is None."""
    network = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(num_steps, 4, 5, generator=generator).requires_grad_()
    states = [torch.randn(4, size, generator=generator).requires_grad_() for size in sizes]
    state = None if not states else states[0] if len(states) == 1 else tuple(states)
    report = ScanReport()
    torch.manual_seed(1)
    if options is None:
        last, ys = plain(network.step, inputs, state, outputs)  # type: ignore[operator, arg-type]
    else:
        last, ys = scan(network.step, inputs, state, outputs=outputs, report=report, **options)  # type: ignore[arg-type]
    lasts = [] if last is None else [last] if isinstance(last, torch.Tensor) else list(last)
    loss = (ys * torch.randn(ys.shape, generator=generator)).sum() + sum((t * t).sum() for t in lasts)
    loss.backward()
    left = [ys.detach(), *(t.detach() for t in lasts), inputs.grad, *(s.grad for s in states)]
    left += [p.grad for p in network.parameters()] + list(network.buffers()) + [torch.get_rng_state()]
    left += [t.detach() for m in network.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)]
    left += [torch.tensor(getattr(network, "count", 0))]
    return left, report


def differing(left: list[Any], right: list[Any]) -> list[int]:
    """Returns the positions that are not bit for bit the same."""
    assert len(left) == len(right)
    return [
        i
        for i, (a, b) in enumerate(zip(left, right, strict=True))
        if not ((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)))
    ]
