"""Loops over time beside spikingjelly's memopt and torch's checkpoint in chunks by hand, in bytes and in steps.

    python -m bench.recurrent_peers [NETWORK ...]

Six networks, three of them made of spiking neurons of the libraries themselves. One meter: the peak of the allocator's
events over forward and backward, the gradients of the parameters included. By hand, a few chunk lengths around the
square root of T are tried and the best one counts; so do memopt's choices of what to checkpoint. Both evaluate each
step at most twice, and so may the scan. Bytes and counts do not depend on how busy the machine is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.recurrent_networks import NETWORKS, Network
from recoup.errors import InfeasibleBudget
from recoup.evidence.memory import measure_peak
from recoup.recurrent import ScanReport, scan
from recoup.recurrent.choose import StepBytes
from recoup.units import format_bytes

CPU = torch.device("cpu")


@dataclasses.dataclass(slots=True, kw_only=True)
class Point:
    """One method on one network: its peak, step evaluations, and how it was set."""

    peak_bytes: int
    evaluations: int
    setting: str
    is_equal: bool = True


def gradients_of(network: Network, run: Callable[[Network], torch.Tensor]) -> list[torch.Tensor]:
    """Returns the output, all gradients and buffers of one step from a fresh start."""
    network.restart()
    torch.manual_seed(1)
    output = run(network)
    output.square().mean().backward()
    found = [output.detach(), *(p.grad for p in network.module.parameters() if p.grad is not None)]
    network.module.zero_grad()
    return [t.clone() for t in found]


def peak_of(network: Network, run: Callable[[Network], torch.Tensor]) -> int:
    """Returns the peak of forward and backward above what was there before."""
    network.restart()
    torch.manual_seed(1)
    network.module.zero_grad()

    def step() -> None:
        run(network).square().mean().backward()

    peak = measure_peak(step, device=CPU, held_bytes=0)
    network.module.zero_grad()
    network.restart()
    return peak


def plain(network: Network) -> torch.Tensor:
    """The loop as one writes it."""
    state, total = network.start(), None
    for x in network.inputs:
        state, y = network.step(state, x)
        total = y if total is None else total + y
    assert total is not None
    return total / len(network.inputs)


def in_chunks(network: Network, chunk: int) -> torch.Tensor:
    """`chunk` steps at a time under torch's checkpoint, the state handed through by hand."""

    def run(part: torch.Tensor, total: torch.Tensor | None, held: Any, state: Any) -> Any:
        network.write(held)
        for x in part:
            state, y = network.step(state, x)
            total = y if total is None else total + y
        return total, network.read(), state

    state, held, total = network.start(), network.read(), None
    for part in network.inputs.split(chunk):
        total, held, state = checkpoint(run, part, total, held, state, use_reentrant=False)
    network.write(held)
    return total / len(network.inputs)


def scanned(network: Network, **options: Any) -> torch.Tensor:
    """The same loop by `scan`."""
    found: torch.Tensor = scan(network.step, network.inputs, network.start(), outputs="mean", **options)[1]
    return found


def by_hand(network: Network) -> Point:
    """Returns the best of a few chunk lengths around the square root of T."""
    root = len(network.inputs) ** 0.5
    chunks = sorted({max(1, round(root * share)) for share in (0.35, 0.5, 0.71, 1.0, 1.41, 2.0)})
    peaks = {c: peak_of(network, lambda n, c=c: in_chunks(n, c)) for c in chunks}
    best = min(peaks, key=lambda c: peaks[c])
    return Point(peak_bytes=peaks[best], evaluations=2 * len(network.inputs), setting=f"chunks of {best}")


def by_memopt(network: Network) -> Point | None:
    """Returns the best of memopt's selections at level 1 (the higher levels want CUDA), None where it has nothing."""
    if network.layers is None:
        return None
    from spikingjelly.activation_based import functional, memopt, neuron

    def run(module: nn.Module) -> None:
        functional.reset_net(module)
        torch.manual_seed(1)
        module(network.inputs).mean(0).square().mean().backward()

    best: Point | None = None
    for blocks in (False, True):
        for budget in ("speed", "balanced", "memory"):
            module = network.layers()
            functional.set_step_mode(module, "m")
            targets = (type(module[0]),) if blocks else (neuron.BaseNode,)
            memopt.optimize_memory(
                module,
                targets,
                lambda m: m(network.inputs),
                level=1,
                checkpoint_budget=budget,
            )
            run(module)
            module.zero_grad()
            peak = measure_peak(lambda m=module: run(m), device=CPU, held_bytes=0)
            if best is None or peak < best.peak_bytes:
                setting = f"{'blocks' if blocks else 'neurons'}, {budget}"
                best = Point(peak_bytes=peak, evaluations=2 * len(network.inputs), setting=setting)
    return best


def by_scan(network: Network, *, derives: bool, budget: int | None = None) -> Point:
    """Returns the scan in `budget` bytes, or in the fewest in which no step is evaluated more than twice."""
    if budget is None:
        budget = _least_budget(network, derives)
    report = ScanReport()
    expected = gradients_of(network, plain)
    found = gradients_of(network, lambda n: scanned(n, budget=budget, rederive=derives))
    peak = peak_of(network, lambda n: scanned(n, budget=budget, rederive=derives, report=report))
    return Point(
        peak_bytes=peak,
        evaluations=report.evaluations,
        setting=f"{'rederived, ' if derives else ''}{report.schedule}",
        is_equal=all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)),
    )


def _least_budget(network: Network, derives: bool) -> int:
    """Returns the smallest budget whose schedule evaluates no step more than twice on average: forwards alone tell."""
    num_steps = len(network.inputs)
    step = _step_bytes(network, derives=derives)
    low, high = step.tape, step.working + num_steps * step.tape
    while high - low > high // 200:
        middle = (low + high) // 2
        report = ScanReport()
        network.restart()
        try:
            scanned(network, budget=middle, rederive=derives, report=report)
            is_enough = report.predicted_evaluations <= 2 * num_steps
        except InfeasibleBudget:
            is_enough = False
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def _step_bytes(network: Network, *, derives: bool) -> StepBytes:
    report = ScanReport()
    network.restart()
    scanned(network, budget="90%", rederive=derives, report=report)
    assert report.step_bytes is not None
    return report.step_bytes


def in_bytes_of(network: Network, peer: Point, results_bytes: int) -> Point | None:
    """Returns the scan with the fewest evaluations whose measured peak is within the peer's."""
    found: list[Point] = []
    for derives in (False, True):
        with contextlib.suppress(InfeasibleBudget):
            point = by_scan(network, derives=derives, budget=peer.peak_bytes - results_bytes)
            if point.peak_bytes <= peer.peak_bytes:
                found.append(point)
    return min(found, key=lambda p: p.evaluations) if found else None


def rows(names: list[str]) -> Iterator[tuple[str, float, float | None]]:
    """Yields (network, bytes beside chunks by hand, bytes beside memopt) after printing what was measured."""
    for name, make in NETWORKS.items():
        if names and name not in names:
            continue
        begin = time.perf_counter()
        torch.manual_seed(0)
        network = make()
        num_steps = len(network.inputs)
        full = peak_of(network, plain)
        hand, memopt = by_hand(network), by_memopt(network)
        ours = min((by_scan(network, derives=d) for d in (False, True)), key=lambda p: p.peak_bytes)
        # Gradients, and the first and the last state: not in a scan's budget, and held by the peers as well.
        results_bytes = sum(p.numel() * p.element_size() for p in network.module.parameters())
        results_bytes += 2 * _step_bytes(network, derives=False).state
        print(f"{name}, T = {num_steps}: plain {format_bytes(full)}")
        print(
            f"  scan {format_bytes(ours.peak_bytes)} in {ours.evaluations} evaluations ({ours.setting}), "
            f"bit-equal {ours.is_equal}"
        )
        ratios: list[float | None] = []
        for label, peer in (("by hand", hand), ("memopt", memopt)):
            if peer is None:
                ratios.append(None)
                continue
            ratios.append(ours.peak_bytes / peer.peak_bytes)
            equal = in_bytes_of(network, peer, results_bytes)
            in_its_bytes = "nothing fits"
            if equal is not None:
                in_its_bytes = f"{equal.evaluations} evaluations ({format_bytes(equal.peak_bytes)})"
            print(
                f"  {label} {format_bytes(peer.peak_bytes)} in {peer.evaluations} ({peer.setting}): {ratios[-1]:.3f} "
                f"of the bytes; in its bytes: {in_its_bytes}"
            )
        print(f"  {time.perf_counter() - begin:.0f} s", flush=True)
        assert ratios[0] is not None
        yield name, ratios[0], ratios[1]


def main(names: list[str]) -> None:
    """Prints every network and the geometric means."""
    found = list(rows(names))
    print(f"geometric mean beside chunks by hand: {statistics.geometric_mean(r for _, r, _ in found):.3f}")
    beside = [r for _, _, r in found if r is not None]
    if beside:
        print(f"geometric mean beside memopt: {statistics.geometric_mean(beside):.3f}")
    best = [max(r, m or 0.0) for _, r, m in found]
    print(f"geometric mean beside the better of the two: {statistics.geometric_mean(best):.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
