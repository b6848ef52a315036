"""An interatomic potential trained on forces, as MACE is: recoup fit examples/today/forces.py --budget 60%"""

import torch
from torch import nn
from torch.nn import functional


class Potential(nn.Module):
    """Energy and forces of a cluster: messages along edges, weighted by networks of the distance."""

    def __init__(self, width=32, layers=3):
        super().__init__()
        self.kinds, self.energy = nn.Embedding(4, width), nn.Linear(width, 1)
        sizes = (8, width)
        self.radial = nn.ModuleList(nn.Sequential(nn.Linear(*sizes), nn.SiLU()) for _ in range(layers))
        self.update = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(layers))

    def forward(self, kinds, positions, senders, receivers):
        """Returns the energy, a scalar, and the forces [atoms, 3]; their gradient differentiates twice."""
        positions, atoms = positions.detach().requires_grad_(), self.kinds(kinds)
        lengths = (positions[senders] - positions[receivers]).norm(dim=1, keepdim=True)
        radii = torch.exp(-((lengths - torch.linspace(0, 4, 8)) ** 2))
        for radial, update in zip(self.radial, self.update, strict=True):
            atoms = atoms + update(torch.zeros_like(atoms).index_add(0, receivers, radial(radii) * atoms[senders]))
        energy = self.energy(atoms).sum()
        return energy, -torch.autograd.grad(energy, positions, create_graph=True)[0]


def step(model, clusters):
    """Energies and forces of a batch of clusters against theirs."""
    made = [(model(*cluster), wanted) for cluster, wanted in clusters]
    return sum(functional.mse_loss(a, b) for pair in made for a, b in zip(*pair, strict=True))


def target(batch=6, atoms=16):
    """Returns a potential and clusters in which every atom sees every other."""
    torch.manual_seed(0)
    edges = (torch.ones(atoms, atoms) - torch.eye(atoms)).nonzero().T
    inputs = [(torch.randint(0, 4, (atoms,)), torch.randn(atoms, 3), *edges) for _ in range(batch)]
    clusters = [(cluster, (torch.zeros(()), torch.randn(atoms, 3))) for cluster in inputs]
    return {"model": Potential(), "batch": clusters, "step": step, "optimizer": torch.optim.AdamW}
