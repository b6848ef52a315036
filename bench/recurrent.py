"""Loops over time: counts against the published optimum, bytes by the allocator, exactness.

The peers are in `bench.recurrent_peers`, the host's overhead in `bench.recurrent_overhead`.

    python -m bench.recurrent [counts] [budgets] [long] [problems]

Peaks are the allocator's events over forward and backward, above what was there before; `budget` counts the same less
the loop's results (outputs, last state, the gradients of parameters), which are reported too.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recoup.evidence.memory import measure_peak
from recoup.recurrent import ScanReport, scan
from recoup.recurrent.schedules.tapes import tape_schedule
from recoup.recurrent.schedules.treeverse import treeverse_schedule
from recoup.units import format_bytes

CPU = torch.device("cpu")


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (v,) = ctx.saved_tensors
        return gradient / (1 + 10 * v.abs()) ** 2


class Lif(nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
        self.sizes = (hidden, outputs)

    def start(self, batch: int) -> Any:
        return tuple(torch.zeros(batch, size) for size in self.sizes)

    def step(self, state: Any, x: torch.Tensor) -> Any:
        u, v = state
        u = 0.9 * u + self.first(x)
        spikes = Spike.apply(u - 1)
        u = u - spikes
        v = 0.9 * v + self.second(spikes)
        out = Spike.apply(v - 1)
        return (u, v - out), out


def plain(step: Any, inputs: Any, state: Any, *, outputs: str) -> Any:
    total, ys = None, []
    for x in inputs:
        state, y = step(state, x)
        if outputs == "sum":
            total = y if total is None else total + y
        else:
            ys.append(y)
    return state, torch.stack(ys) if outputs == "stack" else total


def trained(network: nn.Module, run: Callable[[], Any]) -> list[torch.Tensor]:
    network.zero_grad()
    state, ys = run()
    (ys.square().sum() + sum(t.square().sum() for t in (state if isinstance(state, tuple) else (state,)))).backward()
    return [ys.detach(), *(p.grad for p in network.parameters() if p.grad is not None), *network.buffers()]


def counts() -> None:
    print("## forward evaluations, treeverse")
    for num_steps in (64, 256, 1000):
        print(num_steps, {s: treeverse_schedule(num_steps, s).evaluations for s in (2, 3, 4, 6, 8, 12)})
    print("## states or tapes, T = 1000, a tape takes a state's bytes: evaluations a step")
    print({f"{u / 10:.0f} %": tape_schedule(1000, u).evaluations / 1000 for u in (20, 50, 100, 200)})


def budgets() -> None:
    print("## LIF network 64-256-10, batch 32, T = 1000, in a share of the full tape")
    torch.manual_seed(0)
    network, num_steps = Lif(64, 256, 10), 1000
    x = (torch.rand(num_steps, 32, 64) < 0.3).float()
    results = sum(p.numel() * 4 for p in network.parameters()) + 2 * 32 * 10 * 4

    def run(options: Any) -> Any:
        start = network.start(32)
        if options is None:
            return plain(network.step, x, start, outputs="sum")
        return scan(network.step, x, start, outputs="sum", **options)

    def loss(options: Any) -> None:
        run(options)[1].sum().backward()

    expected = trained(network, lambda: run(None))
    network.zero_grad()
    full = measure_peak(lambda: loss(None), device=CPU, held_bytes=0)
    print(f"plain: peak {format_bytes(full)}")
    full_bytes = 0
    for derives in (False, True):
        for share in (2, 5, 10, 20):
            report = ScanReport()
            options = {"budget": f"{share}%" if not derives else full_bytes * share // 100}
            options |= {"report": report, "rederive": derives}
            equal = all(
                torch.equal(a, b) for a, b in zip(expected, trained(network, lambda o=options: run(o)), strict=True)
            )
            network.zero_grad()
            peak = measure_peak(lambda o=options: loss(o), device=CPU, held_bytes=0) - results
            assert report.step_bytes is not None
            if not derives:
                full_bytes = report.step_bytes.taped(num_steps)
            budget = full_bytes * share // 100
            print(
                f"{share:3} % rederive={derives!s:5} evaluations a step {report.evaluations / num_steps:.3f} "
                f"(predicted {report.predicted_evaluations / num_steps:.3f}), peak {format_bytes(peak)} of "
                f"{format_bytes(budget)} {'ok' if peak <= budget else 'OVER'}, bit-equal {equal}, "
                f"tape {report.step_bytes.tape} B, in a row {report.step_bytes.in_row} B, state "
                f"{report.step_bytes.state} B"
            )


def long() -> None:
    """T = 20,000: run it in a process of its own, the resident memory is that of the whole."""
    print("## T = 20,000")
    torch.manual_seed(0)
    network, num_steps, batch = Lif(16, 1024, 10), 20_000, 128
    x = (torch.rand(num_steps, 1, 16) < 0.3).float()
    report = ScanReport()
    before = _most_resident_bytes()
    start = time.perf_counter()

    def step(state: Any, frame: torch.Tensor) -> Any:
        return network.step(state, frame.expand(batch, -1))

    def loss() -> None:
        scan(step, x, network.start(batch), outputs="sum", budget="70MiB", report=report)[1].sum().backward()

    loss()
    seconds = time.perf_counter() - start
    assert report.step_bytes is not None
    full = report.step_bytes.taped(num_steps)
    print(
        f"budget 70 MiB, all steps taped {full / 1e9:.1f} GB, evaluations a step {report.evaluations / num_steps:.3f} "
        f"(predicted {report.predicted_evaluations / num_steps:.3f}), {seconds:.0f} s; most resident memory "
        f"{_most_resident_bytes() / 1e6:.0f} MB, {before / 1e6:.0f} MB of it before the loop"
    )


def _most_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def problems() -> None:
    print("## problems, bit-equal to the plain loop")
    torch.manual_seed(0)

    class Cell(nn.Module):
        def __init__(self, cell: nn.Module, pair: bool) -> None:
            super().__init__()
            self.cell, self.pair = cell, pair

        def step(self, state: Any, x: torch.Tensor) -> Any:
            state = self.cell(x, state)
            return state, state[0] if self.pair else state

    class StateSpace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Parameter(torch.rand(16) * -1), nn.Linear(8, 16), nn.Linear(16, 8)

        def step(self, h: Any, x: torch.Tensor) -> Any:
            h = torch.exp(self.a) * h + self.b(x)
            return h, self.c(h) * torch.sigmoid(x)

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Sequential(nn.Linear(17, 32), nn.Tanh(), nn.Linear(32, 16))

        def rate(self, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.f(torch.cat([y, t.expand(len(y), 1)], 1))
            return out

        def step(self, y: Any, t: torch.Tensor) -> Any:  # Runge-Kutta 4
            d = 1 / 500
            k1 = self.rate(y, t)
            k2 = self.rate(y + d / 2 * k1, t + d / 2)
            k3 = self.rate(y + d / 2 * k2, t + d / 2)
            k4 = self.rate(y + d * k3, t + d)
            return y + d / 6 * (k1 + 2 * k2 + 2 * k3 + k4), y.sum()

        def denoise(self, y: Any, t: torch.Tensor) -> Any:
            noise = self.rate(y, t)
            return (y - 0.02 * noise) * 1.001 + 0.01 * torch.randn_like(y), y.mean()

    field, field2, ssm = Field(), Field(), StateSpace()
    lstm, gru = Cell(nn.LSTMCell(8, 16), True), Cell(nn.GRUCell(8, 16), False)
    h, x = torch.randn(8, 16), torch.randn(200, 8, 8)
    cases: list[tuple[str, nn.Module, Any, Any, Any]] = [
        ("LSTM cell, 200", lstm, lstm.step, x, (h, h.clone())),
        ("GRU cell, 200", gru, gru.step, x, h),
        ("state space, 200", ssm, ssm.step, x, h),
        ("neural ODE, RK4, 500", field, field.step, torch.linspace(0, 1, 500), h),
        ("diffusion sampler, 100", field2, field2.denoise, torch.linspace(1, 0, 100), h),
    ]
    for name, network, step, inputs, state in cases:
        torch.manual_seed(1)
        expected = trained(network, lambda a=(step, inputs, state): plain(*a, outputs="stack"))
        for options in ({}, {"slots": 6}, {"budget": "20%"}):
            report = ScanReport()
            torch.manual_seed(1)
            found = trained(network, lambda a=(step, inputs, state), o=options, r=report: scan(*a, report=r, **o))
            equal = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
            print(f"{name:24} {report.schedule:48} evaluations {report.evaluations:5} bit-equal {equal}")


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["counts", "budgets", "long", "problems"]
    for part in (counts, budgets, long, problems):
        if part.__name__ in wanted:
            part()
