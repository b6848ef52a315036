"""Tiles that are alike are noted without being run: the trace is that of a capture of all, but where views begin."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recoup.capture import repeats
from recoup.capture.capture import capture
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from recoup.ir.decision import Decision, Recompute, Rederive, TileLoss, TileModule
from recoup.ir.trace import Trace
from recoup.runtime.apply import apply_decisions


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.head(self.norm(x))


TILES = (
    TileModule(path="mlps.0", tile_tokens=15),
    TileModule(path="mlps.1", tile_tokens=16),
    TileModule(path="norm", tile_tokens=16),
    TileLoss(path="head", tile_tokens=10),
)
PLANS = {
    "tiles": TILES,
    "rederive": (Rederive(path=""), *TILES),
    "region": (Recompute(path="mlps.0", inside="rederive"), *TILES),
    "keep": (Recompute(path="mlps.0", keep=("matmul:16x64",)), *TILES[1:]),
}


def captured(spec: StepSpec, decisions: Sequence[Decision], known: Trace | None) -> Trace:
    with apply_decisions(spec.model, decisions):
        return capture(spec, known=known)


def as_told(trace: Trace) -> Trace:
    """Returns the trace with views' arguments left out, and signatures with their ops."""
    of = [dataclasses.replace(s, args=()) if s.is_view else s for s in trace.signatures]
    known: dict[object, int] = {}
    numbers = [known.setdefault(s, len(known)) for s in (of[op.signature] for op in trace.ops)]
    ops = tuple(dataclasses.replace(op, signature=n) for op, n in zip(trace.ops, numbers, strict=True))
    return dataclasses.replace(trace, signatures=tuple(known), ops=ops)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [("tiles", torch.bfloat16), ("rederive", torch.float32), ("region", torch.bfloat16), ("keep", torch.float32)],
)
def test_the_trace_is_that_of_all_tiles(plan: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ids = torch.randint(50, (4, 32))
    objective = Objective(loss=lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch.flatten()))
    spec = StepSpec(model=Model().to(dtype), batch=ids, objective=objective)
    plain = capture(spec)
    said: list[bool] = []
    noted = repeats.repeat

    def repeat(*args: object) -> bool:
        said.append(noted(*args))  # type: ignore[arg-type]
        return said[-1]

    for known in (plain, None):
        monkeypatch.setattr(repeats, "repeat", repeat)
        short = captured(spec, PLANS[plan], known)
        monkeypatch.setattr(repeats, "repeat", lambda *args: False)
        assert as_told(short) == as_told(captured(spec, PLANS[plan], known))
    assert sum(said) >= (3 if plan == "keep" else 7)
