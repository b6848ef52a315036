"""Trains a small convolutional spiking network on real digits, T = 100, plainly and in a tenth of the memory.

    python examples/snn_digits.py

The digits are scikit-learn's (8 x 8 pixels), rate-coded: a pixel is the probability of a spike. Both runs see the same
data and the same spikes; the losses are compared bit for bit.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from recoup.evidence.memory import measure_peak, storage_bytes
from recoup.recurrent import scan


class Spike(torch.autograd.Function):
    """A step forward, a fast sigmoid's slope backward."""

    @staticmethod
    def forward(ctx: Any, v: torch.Tensor) -> torch.Tensor:
        """Returns 1 where the potential is over its threshold."""
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the surrogate gradient."""
        (v,) = ctx.saved_tensors
        return gradient / (1 + 10 * v.abs()) ** 2


class SpikingDigits(nn.Module):
    """Convolution, leaky neurons, pooling, twice; then a readout that integrates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 24, 3, padding=1)
        self.readout = nn.Linear(24 * 4 * 4, 10)

    def start(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the potentials before the first step."""
        return torch.zeros(batch, 12, 8, 8), torch.zeros(batch, 24, 4, 4)

    def step(self, state: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """One time step: potentials and a frame of spikes in, potentials and logits out."""
        u, v = state
        u = 0.9 * u + self.first(x)
        spikes = Spike.apply(u - 1.0)
        u = u - spikes
        v = 0.9 * v + self.second(nn.functional.avg_pool2d(spikes, 2))
        spikes = Spike.apply(v - 1.0)
        v = v - spikes
        return (u, v), self.readout(spikes.flatten(1))


def logits_plain(network: SpikingDigits, spikes: torch.Tensor) -> torch.Tensor:
    """Returns the mean logits over time, by the loop everyone writes."""
    state, total = network.start(spikes.shape[1]), None
    for x in spikes:
        state, y = network.step(state, x)
        total = y if total is None else total + y
    assert total is not None
    return total / len(spikes)


def logits_scan(network: SpikingDigits, spikes: torch.Tensor, budget: str | int) -> torch.Tensor:
    """Returns the same in `budget`."""
    return scan(network.step, spikes, network.start(spikes.shape[1]), outputs="mean", budget=budget)[1]


def train(budget: str | int | None, num_batches: int, batch: int, num_steps: int) -> tuple[list[float], float, int]:
    """Returns the losses, the test accuracy and the peak bytes of a training step above parameters and input."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    order = torch.randperm(len(images))
    images, labels = images[order], labels[order]
    num_test = 360
    network = SpikingDigits()
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    losses: list[float] = []
    peak = 0
    for i in range(num_batches):
        at = torch.arange(i * batch, (i + 1) * batch) % (len(images) - num_test) + num_test
        spikes = (torch.rand(num_steps, batch, 1, 8, 8) < images[at]).float()

        def step(spikes: torch.Tensor = spikes, at: torch.Tensor = at) -> None:
            logits = logits_plain(network, spikes) if budget is None else logits_scan(network, spikes, budget)
            loss = nn.functional.cross_entropy(logits, labels[at])
            losses.append(loss.item())
            loss.backward()

        optimizer.zero_grad()
        if i == 1:
            peak = measure_peak(step, device=torch.device("cpu"), held_bytes=0) - storage_bytes(network.parameters())
        else:
            step()
        optimizer.step()
    with torch.no_grad():
        spikes = (torch.rand(num_steps, num_test, 1, 8, 8) < images[:num_test]).float()
        accuracy = (logits_plain(network, spikes).argmax(1) == labels[:num_test]).float().mean().item()
    return losses, accuracy, peak


def main() -> None:
    """Trains twice and compares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--budget", default="5%", help="bytes, or a share of all steps taped")
    options = parser.parse_args()
    found = [train(budget, options.batches, options.batch, options.steps) for budget in (None, options.budget)]
    for name, (losses, accuracy, peak) in zip(("plain", "scan"), found, strict=True):
        print(f"{name:6} last loss {losses[-1]:.6f}  accuracy {accuracy:.3f}  peak {peak / 2**20:.2f} MiB")
    same = found[0][0] == found[1][0]
    print(f"losses {'bit-equal' if same else 'DIFFER'}; memory {found[1][2] / found[0][2]:.3f} of plain")


if __name__ == "__main__":
    main()
