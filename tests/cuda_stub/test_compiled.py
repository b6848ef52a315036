"""Compiled steps on a GPU, by the torch that the GPU machine has: what compiles there is planned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import recoup
from tests.cuda_stub import kit  # noqa: F401  (skips elsewhere)


class Block(nn.Module):
    """A residual block of a product, an activation and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


@pytest.mark.parametrize("budget", ["92%", "min"])
def test_a_compiled_step_is_within_its_budget(budget: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(64, 1)).cuda()
    batch = torch.randn(2048, 64, device="cuda")
    found = recoup.fit(
        model, batch, budget=budget, loss=lambda out, _: out.square().mean(), compiled={"backend": "aot_eager"}
    )
    evidence = found.evidence
    assert evidence.ok and evidence.gradients_equal and evidence.rng_equal
    assert evidence.peak_bytes <= evidence.budget_bytes
    assert evidence.predicted_peak_bytes == pytest.approx(evidence.peak_bytes, rel=0.03)
    found.applied.remove()
