"""What a step holds is what is predicted: slices, kernels with a workspace of their own, graphs that are dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.evidence.memory import measure_peak, storage_bytes
from tests.safety.helpers import Block, Net, fit, square
from tests.thorough import cases


def measured(model: nn.Module, batch: tuple[Any, ...]) -> int:
    def step() -> None:
        square(model(*batch), batch).backward()

    held = storage_bytes([*model.parameters(), *model.buffers(), *batch])
    peak = measure_peak(step, device=torch.device("cpu"), held_bytes=held)
    model.zero_grad()
    return peak


DATA = torch.randn(50_000, 8)
SLICES = {
    "a copy": lambda: (DATA[:256].clone(),),
    "a slice": lambda: (DATA[:256],),
    "a strided slice": lambda: (DATA[100:612:2],),
    "two slices that overlap": lambda: (DATA[:256], DATA[1:257]),
    "two slices far apart": lambda: (DATA[:256], DATA[-256:]),
}


class Pair(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if y is None else x + y)


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_counts_as_a_slice(name: str) -> None:
    fitted = fit(Pair(), SLICES[name]())
    assert fitted.evidence.exact
    assert fitted.evidence.peak_bytes < DATA.nbytes
    assert fitted.plan.predicted.peak_bytes == pytest.approx(fitted.evidence.peak_bytes, rel=0.02)


class Sequence(nn.Module):
    def __init__(self, rnn: nn.Module, width: int) -> None:
        super().__init__()
        self.rnn = rnn
        self.out = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0])


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(500, 32, mode="mean")
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.table(ids))


def volumes() -> nn.Module:
    return nn.Sequential(nn.Conv3d(3, 8, 3, padding=1), nn.GELU(), nn.Conv3d(8, 8, 3), nn.BatchNorm3d(8), nn.Tanh())


X = torch.randn(4, 20, 16)
OPAQUE: dict[str, Any] = {
    "LSTM": lambda: (Sequence(nn.LSTM(16, 48, 2, batch_first=True), 48), X),
    "LSTM, two ways": lambda: (Sequence(nn.LSTM(16, 32, 2, bidirectional=True, dropout=0.1), 64), X),
    "LSTM with projections": lambda: (Sequence(nn.LSTM(16, 32, 2, proj_size=8), 8), X),
    "GRU": lambda: (Sequence(nn.GRU(16, 48, 2), 48), X),
    "EmbeddingBag": lambda: (Bags(), torch.randint(0, 500, (128, 10))),
    "Conv3d": lambda: (volumes(), torch.randn(2, 3, 8, 8, 8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(OPAQUE, [n for n in OPAQUE if n != "LSTM with projections"]))
def test_kernels_with_a_workspace_of_their_own(name: str) -> None:
    torch.manual_seed(0)
    model, x = OPAQUE[name]()
    assert recoup.profile(model, (x,), loss=square).peak_bytes == pytest.approx(measured(model, (x,)), rel=0.05)
    with pytest.raises(recoup.InfeasibleBudget) as raised:
        recoup.fit(model, (x,), loss=square, budget="20%", timed=False)
    minimum = raised.value.minimum_bytes
    fitted = recoup.fit(model, (x,), loss=square, budget=minimum, timed=False)
    assert fitted.evidence.exact
    assert fitted.evidence.peak_bytes <= minimum


class Codes(nn.Module):
    """An encoder into which no gradient flows: its graph is dropped in the forward."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 64), activation, nn.Linear(64, 64), activation, nn.Linear(64, 4))
        self.decoder = nn.Sequential(nn.Linear(8, 64), activation, nn.Linear(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x * self.encoder(x).argmax(-1)[:, None])


class Sampled(nn.Module):
    """A sample that is thrown away, and gradients taken inside the forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "discarded":
            scale = float(self.net(x).shape[0])
            return self.net(x) / scale
        y = x.detach().requires_grad_()
        with torch.enable_grad():
            (force,) = torch.autograd.grad(self.net(y).sum(), y, retain_graph=self.how == "retained")
        return self.net(x + force.detach())


DROPPED = {
    "tanh": lambda: Codes(nn.Tanh()),
    "softmax": lambda: Codes(nn.Softmax(-1)),
    "elu": lambda: Codes(nn.ELU()),
    "discarded": lambda: Sampled("discarded"),
    "retained": lambda: Sampled("retained"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_a_graph_that_is_dropped_is_gone(name: str) -> None:
    torch.manual_seed(0)
    model, batch = DROPPED[name](), (torch.randn(512, 8),)
    assert recoup.profile(model, batch, loss=square).peak_bytes == pytest.approx(measured(model, batch), rel=0.02)
