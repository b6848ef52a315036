"""What the page takes from its reader: a cell, its state, inputs with time first, a spiking network."""

import torch
from torch import nn

import recoup

cell, readout = nn.GRUCell(8, 16), nn.Linear(16, 4)
inputs, state = torch.randn(20, 32, 8), torch.zeros(32, 16)
batch = torch.randn(20, 32, 8)


class Spiking(nn.Module):
    """A leaky integrator."""

    def __init__(self):
        super().__init__()
        self.weight, self.potential = nn.Linear(8, 4), torch.zeros(())

    def forward(self, x):
        """Returns the potential after one step."""
        self.potential = 0.9 * self.potential + self.weight(x)
        return torch.sigmoid(self.potential)


spiking_network = Spiking()
