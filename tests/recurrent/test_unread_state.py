"""What modules leave in attributes without reading it: not held, there at the end, and held after all if it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recoup.errors import ReplayError
from recoup.recurrent import ScanReport, dead_state, scan
from recoup.recurrent.dead_state import StillRead
from tests.recurrent.helpers import Spike, differing, plain

X = torch.randn(24, 4, 5, generator=torch.Generator().manual_seed(5))


class Watched(nn.Module):
    """Leaves its spikes for whoever wants to see them. `reads` says what a step does with the last ones."""

    def __init__(self, reads: Callable[[Any, int], Any] | None = None) -> None:
        super().__init__()
        self.linear, self.decay = nn.Linear(5, 64), nn.Parameter(torch.tensor(0.9))
        self.spikes: Any = torch.zeros(4, 64)
        self.count = 0
        self.reads = reads

    def step(self, v: Any, x: torch.Tensor) -> Any:
        last = self.reads(self.spikes, self.count) if self.reads is not None else None
        v = self.decay * v + self.linear(x)
        self.spikes = Spike.apply(v - 0.5)
        self.count += 1
        v = v - self.spikes * 0.5
        if isinstance(last, torch.Tensor):
            v = v + 0.1 * last
        return v, v.sum(-1)


def train(run: Any, network: Watched) -> list[Any]:
    torch.manual_seed(3)
    network.linear.reset_parameters()
    start = torch.randn(4, 64).requires_grad_()
    v, ys = run(network.step, X, start)
    (ys.square().sum() + v.sum() + (network.spikes * torch.arange(64)).sum()).backward()
    return [ys.detach(), v.detach(), network.spikes.detach(), start.grad, *(p.grad for p in network.parameters())]


@pytest.mark.parametrize("options", [{}, {"chunk": 24}, {"slots": 3}, {"budget": "30%"}, {"budget": "90%"}], ids=str)
@pytest.mark.parametrize("derives", [False, True])
def test_is_there_at_the_end_with_its_graph(options: dict[str, Any], derives: bool) -> None:
    expected = train(plain, Watched())
    network = Watched()
    assert differing(expected, train(lambda *a: scan(*a, rederive=derives, **options), network)) == []
    assert network.spikes.requires_grad


def test_is_not_held() -> None:
    def state_bytes(network: Watched) -> int:
        report = ScanReport()
        scan(network.step, X, torch.zeros(4, 64), budget="50%", report=report)
        assert report.step_bytes is not None
        return report.step_bytes.state

    once = 4 * 64 * 4
    assert state_bytes(Watched()) == once
    assert state_bytes(Watched(lambda spikes, count: spikes * 2)) == 2 * once


def _reads_late(spikes: Any, count: int) -> Any:
    return spikes * 2 if count == 7 else None


def _asks_late(spikes: Any, count: int) -> Any:
    return torch.ones(()) if count == 7 and isinstance(spikes, torch.Tensor) else None


def _compares_late(spikes: Any, count: int) -> Any:
    return 2 + spikes if count == 20 else None


@pytest.mark.parametrize("reads", [_reads_late, _asks_late, _compares_late])
@pytest.mark.parametrize("options", [{}, {"chunk": 3}, {"budget": "40%"}], ids=str)
def test_what_a_late_step_reads_is_held_after_all(reads: Any, options: dict[str, Any]) -> None:
    expected = train(plain, Watched(reads))
    assert differing(expected, train(lambda *a: scan(*a, **options), Watched(reads))) == []


def test_going_back_puts_statistics_and_random_numbers_back() -> None:
    class Noisy(Watched):
        def __init__(self, reads: Any) -> None:
            super().__init__(reads)
            self.norm, self.drop = nn.BatchNorm1d(64), nn.Dropout(0.2)

        def step(self, v: Any, x: torch.Tensor) -> Any:
            v, y = super().step(self.drop(self.norm(v)), x)
            return v, y

    def buffers(run: Any) -> list[Any]:
        torch.manual_seed(9)
        network = Noisy(_reads_late)
        statistics = network.norm.running_mean
        found = train(run, network)
        assert network.norm.running_mean is statistics
        return [*found, *network.buffers(), torch.get_rng_state(), torch.tensor(network.count)]

    assert differing(buffers(plain), buffers(lambda *a: scan(*a, chunk=4))) == []


def test_a_step_that_fails_leaves_something_to_use() -> None:
    def fails(spikes: Any, count: int) -> Any:
        if count == 9:
            raise ValueError("no")

    network = Watched(fails)
    with pytest.raises(ValueError, match="no"):
        scan(network.step, X, torch.zeros(4, 64))
    assert network.spikes is not dead_state.UNREAD
    assert network.spikes.shape == (4, 64)


def test_a_step_that_reads_it_only_in_backward_is_told() -> None:
    flags = [False]
    network = Watched(lambda spikes, count: spikes * 2 if flags[0] else None)
    _, ys = scan(network.step, X, torch.zeros(4, 64), chunk=4)
    flags[0] = True
    with pytest.raises(ReplayError, match="reads an attribute"):
        ys.sum().backward()
    assert network.spikes.shape == (4, 64)


@pytest.mark.parametrize(
    "use",
    [
        lambda u: u + 1,
        lambda u: 1 + u,
        lambda u: torch.ones(2) * u,
        lambda u: torch.cat([u, u]),
        lambda u: torch.ones(2).add_(u),
        lambda u: u.shape,
        lambda u: bool(u),
        lambda u: isinstance(u, torch.Tensor),
        lambda u: u == 0,
        lambda u: u[0],
        lambda u: hash(u),
        lambda u: str(u),
        lambda u: nn.Linear(2, 2)(u),
        lambda u: setattr(u, "a", 1),
    ],
)
def test_every_use_is_refused(use: Callable[[Any], Any]) -> None:
    with dead_state.refusing(), pytest.raises(StillRead):
        use(dead_state.UNREAD)
    with pytest.raises(TypeError, match="not kept"):
        dead_state.UNREAD + 1
    assert not any(isinstance(found, torch.Tensor) for found in [dead_state.UNREAD])  # who walks over all objects
    assert dead_state.UNREAD is not None
