"""Saved-tensor hooks of recoup's that pass a tensor on neither hold its graph nor hide a change from autograd."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.evidence.memory import measure_peak
from recoup.recurrent import scan
from recoup.runtime.step_watch import StepWatch
from recoup.runtime.tile.inside import inside_tile

BATCH = torch.ones(8, 4)


class Net(nn.Module):
    """Saves what it returns, which may be changed afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen: list[weakref.ref[Any]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x).sigmoid()
        self.seen.append(weakref.ref(out.untyped_storage()))
        return out


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[None]:
    watch = StepWatch(model, recoup.plan(model, BATCH, loss=lambda out, _: out.sum(), budget="100%"))
    yield
    watch.remove()
    assert watch.num_looked_at


HOOKS: dict[str, Callable[[nn.Module], contextlib.AbstractContextManager[Any]]] = {
    "watch": _watched,
    "offload of what is large": lambda model: recoup.offload(model, transport="inline"),
    "tile": lambda model: inside_tile(keeps=True),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_graph_that_no_backward_follows_is_freed_at_once(kind: str) -> None:
    model = Net()
    with HOOKS[kind](model):
        gc.disable()
        try:
            model(BATCH)
            assert model.seen[-1]() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("kind", HOOKS)
def test_a_saved_tensor_that_was_changed_is_refused_as_in_plain(kind: str) -> None:
    model = Net()
    with HOOKS[kind](model):
        out = model(BATCH)
        out.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(16, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.cell(x, h)
            return h, h

        return self.head(scan(step, x, x.new_zeros(x.shape[1], 64))[1]).logsumexp(-1).mean()


def test_a_planned_scan_peaks_as_planned_while_its_step_is_watched() -> None:
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(24, 64, 16)
    plan = recoup.plan(model, x, budget="80%")
    held_bytes = sum(p.nbytes for p in model.parameters()) + x.nbytes
    with recoup.apply(model, plan) as applied:
        peaks = []
        for _ in range(3):
            model.zero_grad()
            peaks.append(measure_peak(lambda: model(x).backward(), device=x.device, held_bytes=held_bytes))
        assert applied._watch is not None and applied._watch.num_looked_at
    assert peaks == 3 * [plan.predicted.peak_bytes]
