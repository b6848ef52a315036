"""A selective state space, token by token: recoup fit examples/today/mamba.py --budget 60%"""

import torch
from torch import nn
from torch.nn import functional


class Cell(nn.Module):
    """One token: what is kept decays, what comes is added; both as the token says."""

    def __init__(self, width, states):
        super().__init__()
        self.log_decay = nn.Parameter(torch.rand(width, states))

    def forward(self, state, u, rate, write, read):
        """Maps the state [batch, width, states] to the next one, and to an output [batch, width]."""
        rate = functional.softplus(rate).unsqueeze(-1)
        state = state * torch.exp(-rate * self.log_decay.exp()) + rate * write.unsqueeze(1) * u.unsqueeze(-1)
        return state, (state * read.unsqueeze(1)).sum(-1)


class Mixer(nn.Module):
    """Mamba's mixer without its short convolution."""

    def __init__(self, width, states=8):
        super().__init__()
        self.norm, self.enter, self.leave = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.select, self.cell = nn.Linear(width, width + 2 * states), Cell(width, states)
        self.sizes = [width, states, states]

    def forward(self, x):
        """Maps [batch, time, width] to the same shape."""
        u, gate = self.enter(self.norm(x)).chunk(2, dim=-1)
        state, outputs = x.new_zeros(x.shape[0], *self.sizes[:2]), []
        for token in zip(u.unbind(1), *(t.unbind(1) for t in self.select(u).split(self.sizes, -1)), strict=True):
            state, y = self.cell(state, *token)
            outputs.append(y)
        return x + self.leave(torch.stack(outputs, 1) * functional.silu(gate))


def target(batch=4, seq=64):
    """Returns a mixer and a sequence of vectors."""
    torch.manual_seed(0)
    return {"model": Mixer(32), "batch": torch.randn(batch, seq, 32), "loss": lambda y, x: functional.mse_loss(y, x)}
