"""What it costs to run an op of a compiled graph again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from recoup.capture.snapshot import untouched
from recoup.capture.step import make_objective
from recoup.compiled.fitting import CompiledFitting
from recoup.compiled.recording import CompileOptions
from recoup.cost.cache import Measurement
from recoup.cost.measured import MeasuredCost
from recoup.ir.trace import Signature


class Block(nn.Module):
    """A product, elementwise ops and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(self.linear(x).tanh(), 0.5)
        return (h * h.sin()).sum()


def test_ops_without_flops_are_priced_by_their_measured_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: MeasuredCost, signatures: Sequence[Signature]) -> list[Measurement]:
        draws = [s.name.split(".")[1] in ("native_dropout", "bernoulli", "rand", "rand_like") for s in signatures]
        times = [30.0 if is_random else 1.0 for is_random in draws]
        return [
            Measurement(seconds=t, warm_seconds=t, spread_seconds=0.0, workspace_bytes=0, extra_output_bytes=0)
            for t in times
        ]

    def prices() -> tuple[dict[bool, list[float]], float, float]:
        model, given = Block(), torch.randn(256, 64)
        objective, batch = make_objective(given)
        with untouched(model, batch, objective.functions):
            fitting = CompiledFitting(model, batch, objective, None, CompileOptions.of({"backend": "aot_eager"}))
            fitting.record()
        (graph,) = fitting.recording.graphs.values()
        ops = graph.view.step.ops
        rest = [op for op in ops if op.seconds and not op.flops]
        own = {is_random: [op.seconds for op in rest if op.is_random == is_random] for is_random in (True, False)}
        return own, sum(map(sum, own.values())), sum(op.seconds for op in ops if op.flops)

    monkeypatch.setattr(MeasuredCost, "measured", lambda self, signatures: [None for _ in signatures])
    estimated, total, products = prices()
    monkeypatch.setattr(MeasuredCost, "measured", run)
    measured, total_measured, products_measured = prices()
    assert total_measured == pytest.approx(total) and products_measured == products
    assert min(measured[True]) > 4 * max(measured[False])
    assert max(estimated[True]) < 4 * max(estimated[False])
