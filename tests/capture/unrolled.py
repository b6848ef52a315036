"""Models that loop over time, each with its own way of being regular, or not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

X = torch.Tensor


class Cell(nn.Module):
    """A step with modules inside."""

    def __init__(self, *, dropout: float = 0.0, batch_norm: bool = False) -> None:
        super().__init__()
        self.i = nn.Linear(8, 16)
        self.h = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16) if batch_norm else nn.LayerNorm(16)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: X, h: X) -> X:
        return self.drop(torch.tanh(self.norm(self.i(x) + self.h(h))))


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: X) -> X:
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: X) -> X:
        (v,) = ctx.saved_tensors
        return grad / (1 + v.abs()) ** 2


class Neuron(nn.Module):
    """Its state is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.i = nn.Linear(8, 16)
        self.decay = nn.Parameter(torch.tensor(0.9))
        self.v: X | None = None

    def forward(self, x: X) -> X:
        v = self.i(x) if self.v is None else self.decay * self.v + self.i(x)
        spikes = Spike.apply(v - 1)
        self.v = v - spikes.detach()
        return spikes


class Layered(nn.Module):
    """The state's old tensor goes when the new one is bound, in the middle of the step; states in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.h = nn.Linear(8, 16), nn.Linear(16, 16)
        self.v: Any = None

    def forward(self, x: X) -> X:
        old = self.v
        u = self.i(x) if old is None else self.i(x) + 0.5 * old[0]
        del old
        self.v = (u, u.detach() * 2)
        return torch.relu(self.h(torch.tanh(u)))


class Both(Cell):
    """Its output is its state."""

    def forward(self, x: X, h: X) -> Any:
        h = super().forward(x, h)
        return h, h


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTMCell(8, 16), nn.LSTMCell(16, 16)])

    def forward(self, x: X, state: Any) -> Any:
        new = []
        for layer, old in zip(self.layers, state, strict=True):
            old = layer(x, old)
            x = old[0]
            new.append(old)
        return x, new


class Inner(nn.Module):
    """A loop in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.GRUCell(8, 16)

    def forward(self, x: X, h: X) -> X:
        for _ in range(3):
            h = self.c(x, h)
        return h


class Masked(nn.Module):
    """A mask is drawn in the first step and held."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.h = nn.Linear(8, 16), nn.Linear(16, 16)
        self.mask: X | None = None

    def forward(self, x: X, h: X) -> X:
        if self.mask is None:
            self.mask = torch.bernoulli(torch.full(h.shape, 0.5))
        return torch.tanh(self.i(x) + self.h(h * self.mask))


class Average(nn.Module):
    """A buffer changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.i = nn.Linear(8, 16)
        self.register_buffer("mean", torch.zeros(64, 16))

    def forward(self, x: X, h: X) -> X:
        z = torch.tanh(self.i(x) + h)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(z.detach())
        return z + self.mean.clone()


class Named(Cell):
    """State in a dict."""

    def forward(self, x: X, state: dict[str, X]) -> Any:
        return {"h": super().forward(x, state["h"]), "steps": state["steps"] + 1}


class Odd(Cell):
    """The 18th step is another one."""

    def forward(self, x: X, h: X, t: int) -> X:
        h = super().forward(x, h)
        return torch.relu(h) if t == 17 else h


class Counting(Cell):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: X, h: X) -> X:
        self.steps += 1
        return super().forward(x, h)


class Chance(Cell):
    def forward(self, x: X, h: X) -> X:
        return super().forward(x, h) * (1.0 if random.random() < 0.5 else 2.0)


class Parts(nn.Module):
    """Its results share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Linear(24, 32)

    def forward(self, x: X, h: X) -> Any:
        a, b = self.g(torch.cat([x, h], 1)).chunk(2, 1)
        return a, b


class Context(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i, self.h = nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, x: X, h: X, c: X) -> X:
        return torch.tanh(self.i(x) + self.h(h) * c)


class Loop(nn.Module):
    def __init__(self, cell: nn.Module, run: Callable[[Any, X], X]) -> None:
        super().__init__()
        self.cell = cell
        self.run = run
        self.out = nn.Linear(16, 4)

    def forward(self, x: X) -> X:
        return self.run(self, x)


def _zeros(x: X) -> X:
    return x.new_zeros(x.shape[1], 16)


def _last(m: Any, x: X) -> X:
    h = _zeros(x)
    for t in range(len(x)):
        h = m.cell(x[t], h)
    return m.out(h)


def _stack(m: Any, x: X) -> X:
    h, found = _zeros(x), []
    for t in range(len(x)):
        h = m.cell(x[t], h)
        found.append(h)
    return m.out(torch.stack(found))


def _readout(m: Any, x: X) -> X:
    h, total = _zeros(x), x.new_zeros(())
    for t in range(len(x)):
        h = m.cell(x[t], h)
        total = total + nn.functional.mse_loss(m.out(h), x[t, :, :4])
    return total


def _neuron(m: Any, x: X) -> X:
    m.cell.v = None
    total: Any = 0
    for frame in x.unbind(0):
        total = total + m.out(m.cell(frame))
    return total


def _lstm(m: Any, x: X) -> X:
    state, found = (_zeros(x), _zeros(x)), []
    for t in range(len(x)):
        state = m.cell(x[t], state)
        found.append(state[0])
    return m.out(torch.stack(found))


def _both(m: Any, x: X) -> X:
    h, found = _zeros(x), []
    for t in range(len(x)):
        y, h = m.cell(x[t], h)
        found.append(y)
    return m.out(torch.stack(found))


def _deep(m: Any, x: X) -> X:
    state: Any = [(_zeros(x), _zeros(x)) for _ in range(2)]
    for t in range(len(x)):
        y, state = m.cell(x[t], state)
    return m.out(y)


def _before(m: Any, x: X) -> X:
    h = _zeros(x)
    for t in range(len(x)):
        h = m.cell(torch.relu(x[t] * m.out.weight[0, :8]), h)
    return m.out(h)


def _gradients_in(m: Any, x: X) -> X:
    return _last(m, torch.tanh(x * m.out.weight[0, :8]))


def _same_input(m: Any, x: X) -> X:
    z, h = torch.tanh(x[0] * m.out.weight[0, :8]), _zeros(x)
    for _ in range(len(x)):
        h = m.cell(z, h)
    return m.out(h)


def _bfloat16(m: Any, x: X) -> X:
    with torch.autocast("cpu", torch.bfloat16):
        return _stack(m, x)


def _two(m: Any, x: X) -> X:
    h, found = _zeros(x), []
    for t in range(len(x)):
        h = m.cell[0](x[t], h)
        found.append(h)
    h = _zeros(x)
    for y in found:
        h = m.cell[1](y[:, :8], h)
    return m.out(h)


def _into(m: Any, x: X) -> X:
    h, found = _zeros(x), x.new_zeros(len(x), x.shape[1], 16)
    for t in range(len(x)):
        h = m.cell(x[t], h)
        found[t] = h
    return m.out(found)


def _skips(m: Any, x: X) -> X:
    found = [_zeros(x), _zeros(x)]
    for t in range(len(x)):
        found.append(m.cell(x[t], found[-1] + found[-2]))
    return m.out(found[-1])


def _masked(m: Any, x: X) -> X:
    m.cell.mask = None
    return _last(m, x)


def _named(m: Any, x: X) -> X:
    state = {"h": _zeros(x), "steps": _zeros(x)}
    for t in range(len(x)):
        state = m.cell(x[t], state)
    return m.out(state["h"] + state["steps"])


def _scaled(m: Any, x: X) -> X:
    h = _zeros(x)
    for t in range(len(x)):
        h = h + m.cell(x[t], h) * (0.1 * t)
    return m.out(h)


def _checkpointed(m: Any, x: X) -> X:
    h = _zeros(x)
    for t in range(len(x)):
        h = checkpoint(m.cell, x[t], h, use_reentrant=False)
    return m.out(h)


def _backwards(m: Any, x: X) -> X:
    h = _zeros(x)
    for t in reversed(range(len(x))):
        h = m.cell(x[t : t + 1].squeeze(0), h)
    return m.out(h)


def _context(m: Any, x: X) -> X:
    c = torch.tanh(x[0] @ m.out.weight[:, :8].t()) @ m.out.weight
    h = _zeros(x)
    for t in range(len(x)):
        h = m.cell(x[t], h, c) + c
    return m.out(h)


def _numbered(m: Any, x: X) -> X:
    h = _zeros(x)
    for t in range(len(x)):
        h = m.cell(x[t], h, t)
    return m.out(h)


def _doubled_once(m: Any, x: X) -> X:
    h = _zeros(x)
    for t in range(len(x)):
        h = m.cell(x[t], h)
        h = h * 2 if t == 20 else h
    return m.out(h)


def _detached_once(m: Any, x: X) -> X:
    h, total = _zeros(x), _zeros(x)
    for t in range(len(x)):
        h = m.cell(x[t], h)
        with torch.set_grad_enabled(t != 21):
            y = h * 2
        total = total + y
    return m.out(total)


def _truncated(m: Any, x: X) -> X:
    h = _zeros(x)
    for t in range(len(x)):
        h = m.cell(x[t], h.detach() if t % 8 == 7 else h)
    return m.out(h)


def _second_half(m: Any, x: X) -> X:
    h, total = _zeros(x), _zeros(x)
    for t in range(len(x)):
        h = m.cell(x[t], h)
        total = total + h if 2 * t >= len(x) else total
    return m.out(total)


def _hooked(m: Any, x: X) -> X:
    h = _zeros(x)
    for t in range(len(x)):
        h = m.cell(x[t], h)
        h.register_hook(lambda g: g * 2)
    return m.out(h)


def _growing(m: Any, x: X) -> X:
    found = [_zeros(x)]
    for t in range(len(x)):
        found.append(m.cell(x[t], torch.stack(found).mean(0)))
    return m.out(found[-1])


def _doubling() -> nn.Module:
    cell = Cell()
    cell.h.register_forward_hook(lambda m, args, out: out * 2)
    return cell


REGULAR: dict[str, Callable[[], nn.Module]] = {
    "gru": lambda: Loop(nn.GRUCell(8, 16), _last),
    "gru, stacked": lambda: Loop(nn.GRUCell(8, 16), _stack),
    "lstm": lambda: Loop(nn.LSTMCell(8, 16), _lstm),
    "neuron": lambda: Loop(Neuron(), _neuron),
    "states in a tuple": lambda: Loop(Layered(), _neuron),
    "readout": lambda: Loop(Cell(), _readout),
    "dropout": lambda: Loop(Cell(dropout=0.2), _stack),
    "batch norm": lambda: Loop(Cell(batch_norm=True), _last),
    "state and output": lambda: Loop(Both(), _both),
    "deep": lambda: Loop(Deep(), _deep),
    "work before": lambda: Loop(Cell(), _before),
    "gradients in": lambda: Loop(Cell(), _gradients_in),
    "same input": lambda: Loop(Cell(), _same_input),
    "bfloat16": lambda: Loop(nn.GRUCell(8, 16), _bfloat16),
    "two loops": lambda: Loop(nn.ModuleList([Cell(), Cell()]), _two),
    "loop in a loop": lambda: Loop(Inner(), _last),
    "into a tensor": lambda: Loop(Cell(), _into),
    "two steps back": lambda: Loop(Cell(), _skips),
    "mask": lambda: Loop(Masked(), _masked),
    "average": lambda: Loop(Average(), _last),
    "dict": lambda: Loop(Named(), _named),
    "scaled by the step": lambda: Loop(Cell(), _scaled),
    "checkpointed": lambda: Loop(Cell(), _checkpointed),
    "backwards": lambda: Loop(Cell(), _backwards),
}
"""Loops whose calls are alike."""

IRREGULAR: dict[str, Callable[[], nn.Module]] = {
    "another step": lambda: Loop(Odd(), _numbered),
    "a counter": lambda: Loop(Counting(), _last),
    "python's random numbers": lambda: Loop(Chance(), _last),
    "results that share memory": lambda: Loop(Parts(), _both),
    "a context used twice": lambda: Loop(Context(), _context),
    "doubled once": lambda: Loop(Cell(), _doubled_once),
    "detached once": lambda: Loop(Cell(), _detached_once),
    "truncated": lambda: Loop(Cell(), _truncated),
    "second half": lambda: Loop(Cell(), _second_half),
    "hooks on tensors": lambda: Loop(Cell(), _hooked),
    "hooks on modules": lambda: Loop(_doubling(), _last),
    "growing": lambda: Loop(Cell(), _growing),
}
"""Loops that have to be captured in full."""
