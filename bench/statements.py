"""Statements that circulate about activation checkpointing, measured: `python -m bench.statements`.

Bytes and FLOPs are of captured steps (deterministic); times are medians of interleaved pairs on this machine.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import recoup
from recoup.capture.spec import StepSpec
from recoup.cost.model import FlopsCost
from recoup.evidence.memory import measure_peak
from recoup.evidence.speed import time_ratio
from recoup.planner.driver import Planner
from recoup.planner.strategies.registry import DEFAULT_ACTIONS
from recoup.selective import CheckpointConfig, ReversibleSequential, SelectiveCheckpointer
from recoup.selective.strategies import choose
from recoup.units import format_bytes

WIDTH = 128


def block(width: int = WIDTH) -> nn.Module:
    """Returns a pre-norm MLP block."""
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def chain(depth: int) -> nn.Module:
    """Returns a chain of equal blocks."""
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(depth)))


def strategies(model: nn.Module, batch: torch.Tensor, kinds: dict[str, CheckpointConfig]) -> list[str]:
    """Returns a line for each strategy: saved bytes and FLOPs run twice, as shares of the plain step's."""
    planner = Planner(StepSpec(model=model, batch=batch), cost=FlopsCost(), actions=DEFAULT_ACTIONS)
    flops = sum(planner.trace.signatures[op.signature].flops for op in planner.trace.ops)
    plain = planner.plain
    lines = []
    for name, config in kinds.items():
        found = planner.simulate(choose(config, model, None).decisions)
        lines.append(
            f"  {name:16} held for backward {100 * found.saved_bytes / plain.saved_bytes:5.1f} % of plain, peak "
            f"{100 * found.peak_bytes / plain.peak_bytes:5.1f} %, run twice "
            f"{100 * found.recomputed_flops / flops:4.1f} % of the step's FLOPs"
        )
    return lines


def every_kth() -> list[str]:
    """Measures every-k on 12 blocks."""
    kinds = {f"every {k}": CheckpointConfig(strategy="full", every=k) for k in (1, 2, 3, 4, 6)}
    return ['"every k-th layer costs 10-15 %": 12 blocks', *strategies(chain(12), torch.randn(512, WIDTH), kinds)]


def hundred_layers() -> list[str]:
    """Measures sqrt(n) on 100 blocks."""
    kinds = {
        "sqrt(n)": CheckpointConfig(strategy="sequential"),
        "every block": CheckpointConfig(strategy="full"),
    }
    return [
        '"100 layers: 10x memory for 10 % compute": 100 blocks',
        *strategies(chain(100), torch.randn(64, WIDTH), kinds),
    ]


def in_place() -> list[str]:
    """Runs an in-place ReLU in the middle, at the end and at the beginning of regions."""
    kinds = {
        "in the middle": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)),
        "at the end": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)),
        "at the beginning": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)),
    }
    lines = ['"in-place ReLU always breaks it": where it stands in the region']
    for name, make in kinds.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(make() for _ in range(3)))
        lines.append(f"  {name:16} {_outcome(model, torch.randn(4, 8))}")
    return lines


def dropout() -> list[str]:
    """Runs dropout in regions."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)) for _ in range(3)))
    return ['"dropout flags are not replayed"', f"  dropout 0.5      {_outcome(model, torch.randn(4, 8))}"]


def _outcome(model: nn.Module, batch: torch.Tensor) -> str:
    def gradients(one: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        one(batch).square().mean().backward()
        return [p.grad for p in one.parameters() if p.grad is not None]

    plain = gradients(copy.deepcopy(model))
    SelectiveCheckpointer(CheckpointConfig(enabled=True, strategy="full")).apply(model)
    try:
        same = all(torch.equal(a, b) for a, b in zip(plain, gradients(model), strict=True))
    except recoup.ReplayError as error:
        return f"refused: {str(error).partition('.')[0]}"
    return "gradients bit-equal" if same else "gradients differ"


def reversible() -> list[str]:
    """Compares ReversibleSequential with checkpointing its couplings, and with sqrt(n) segments of them."""
    torch.manual_seed(0)
    depth, half = 32, WIDTH // 2
    model = ReversibleSequential((block(half), block(half)) for _ in range(depth))
    batch = torch.randn(2048, WIDTH)
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())

    def coupled(x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        for f, g in zip(model.f[first:last], model.g[first:last], strict=True):
            a = a + f(b)
            b = b + g(a)
        return torch.cat([a, b], -1)

    def segmented(step: int) -> torch.Tensor:
        x = batch
        for i in range(0, depth, step):
            x = torch.utils.checkpoint.checkpoint(coupled, x, i, i + step, use_reentrant=False)
        return x

    kinds = {
        "plain": lambda: model.plain_forward(batch),
        "reversible": lambda: model(batch),
        "every coupling": lambda: segmented(1),
        "segments": lambda: segmented(4),
    }
    results = {}
    lines = [f"ReversibleSequential and checkpointing, {depth} couplings of width {WIDTH}, {len(batch)} rows, float32"]
    for name, forward in kinds.items():

        def step(forward=forward) -> None:
            forward().square().mean().backward()

        model.zero_grad()
        peak = measure_peak(step, device=batch.device, held_bytes=0) - parameter_bytes
        results[name] = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        ratio, spread = time_ratio(
            lambda: kinds["plain"]().square().mean().backward(), step, device=batch.device, max_seconds=8
        )
        error = max(
            float((a - b).norm() / a.norm()) for a, b in zip(results["plain"], results[name], strict=True) if a.norm()
        )
        lines.append(
            f"  {name:16} activations {format_bytes(peak):>9}, time {ratio:.2f} +- {spread:.2f} of plain, largest "
            f"relative gradient error {error:.1e}"
        )
    return lines


def main() -> None:
    """Prints everything."""
    for part in (every_kth, hundred_layers, in_place, dropout, reversible):
        print("\n".join(part()), end="\n\n")


if __name__ == "__main__":
    main()
