"""Compiled steps on a GPU, by the torch that the GPU machine has: what compiles there is planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from tests.cuda_stub import kit  # noqa: F401  (skips elsewhere)


class Block(nn.Module):
    """A residual block of a product, an activation and a product."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return out


class Words(nn.Module):
    """Blocks with eager code between them; returns the loss beside logits, whose gradient nobody asks for."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout=0.1) for _ in range(num_blocks))
        self.head = nn.Linear(64, 256)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x) * 0.5
        logits = self.head(x)
        targets = torch.zeros(len(x), dtype=torch.long, device=x.device)
        return {"loss": nn.functional.cross_entropy(logits, targets), "logits": logits}


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


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "whole": ({}, {}),
    "blocks": ({"modules": ["blocks.*"]}, {}),
    "dynamic": ({"dynamic": True}, {}),
    "autocast": ({}, {"autocast": torch.bfloat16}),
    "accumulate": ({}, {"accumulate": 2}),
}


@pytest.mark.parametrize(("way", "budget"), [("whole", "75%"), *((way, "min") for way in WAYS)])
def test_ways_to_compile(way: str, budget: str) -> None:
    torch.manual_seed(0)
    options, step = WAYS[way]
    model, batch = Words().cuda(), torch.zeros(32768, 64, device="cuda")
    found = recoup.fit(model, batch, budget=budget, compiled={"backend": "aot_eager", **options}, timed=False, **step)
    evidence = found.evidence
    assert evidence.ok and evidence.rng_equal and evidence.peak_bytes <= evidence.budget_bytes
    assert not all(graph.is_torch for graph in found.plan.graphs)
    assert evidence.predicted_peak_bytes == pytest.approx(evidence.peak_bytes, rel=0.01)
    for _ in range(2):  # training goes on, within the bytes that were measured
        torch.cuda.reset_peak_memory_stats()
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled="autocast" in step):
            loss = model(batch)["loss"]
        loss.backward()
        assert torch.cuda.max_memory_allocated() <= evidence.peak_bytes
    found.applied.remove()
