"""Plans by tensor beside `torch.utils.checkpoint` put by hand around functions: peaks, FLOPs, time, bits.

    python -m bench.by_tensor [MODEL ...]

Writes a Markdown table to stdout. Time is processor time, medians of ratios of interleaved steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import recoup
from bench.functional_models import FUNCTIONAL, checkpointed
from bench.last_models import LAST
from bench.measuring import NUM_SETTLING, flop_counter
from bench.more_functional_models import MORE_FUNCTIONAL
from bench.stranger_models import STRANGERS
from recoup.errors import InfeasibleBudget
from recoup.evidence.memory import measure_peak, storage_bytes

NUM_PAIRS = 7
MODELS = FUNCTIONAL | MORE_FUNCTIONAL | STRANGERS | LAST
CPU = torch.device("cpu")


def loss(output: Tensor, batch: Any) -> Tensor:
    return output.pow(2).mean()


def step(model: nn.Module, batch: tuple[Tensor, ...]) -> None:
    torch.manual_seed(2)
    loss(model(*batch), batch).backward()


def measured(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[int, list[Tensor]]:
    """Returns the peak of a step and its gradients."""
    model.zero_grad(set_to_none=True)
    held_bytes = storage_bytes([*model.parameters(), *model.buffers(), *batch])
    peak_bytes = measure_peak(lambda: step(model, batch), device=CPU, held_bytes=held_bytes)
    return peak_bytes, [p.grad.clone() for p in model.parameters()]


def flops(model: nn.Module, batch: tuple[Tensor, ...]) -> int:
    with flop_counter() as counter:
        step(model, batch)
    return counter.get_total_flops()


def seconds(model: nn.Module, batch: tuple[Tensor, ...]) -> float:
    start = time.process_time()
    step(model, batch)
    return time.process_time() - start


def planned(model: nn.Module, batch: tuple[Tensor, ...], budget: int) -> recoup.Plan:
    """Returns the plan for a budget, the leanest one if that is below the floor."""
    try:
        return recoup.plan(model, batch, budget=budget, loss=loss, actions=("rebuild",))
    except InfeasibleBudget as error:
        return recoup.plan(model, batch, budget=error.minimum_bytes, loss=loss, actions=("rebuild",))


def row(name: str) -> str:
    made = MODELS[name]
    plain, by_hand, ours = made.make(), made.make(checkpointed), made.make()
    torch.manual_seed(1)
    batch = made.batch()
    measured(plain, batch)  # the first step sets up what stays
    plain_bytes, gradients = measured(plain, batch)
    hand_bytes, _ = measured(by_hand, batch)
    plain_flops = flops(plain, batch)
    hand_flops = flops(by_hand, batch) / plain_flops - 1
    floor = planned(ours, batch, 1).predicted
    plan = planned(ours, batch, hand_bytes)
    with recoup.apply(ours, plan):
        our_bytes, our_gradients = measured(ours, batch)
        our_flops = flops(ours, batch) / plain_flops - 1
        for _ in range(NUM_SETTLING):
            seconds(ours, batch)
        times = [(seconds(plain, batch), seconds(by_hand, batch), seconds(ours, batch)) for _ in range(NUM_PAIRS)]
    hand_time, our_time = (statistics.median(t[i] / t[0] for t in times) for i in (1, 2))
    equal = "equal" if all(map(torch.equal, gradients, our_gradients)) else "DIFFERENT"
    return (
        f"| {name} | {plain_bytes / 2**20:.0f} MiB | {hand_bytes / plain_bytes:.3f} | +{hand_flops:.1%} "
        f"| {hand_time:.2f} | {our_bytes / plain_bytes:.3f} | +{our_flops:.1%} | {our_time:.2f} "
        f"| {floor.peak_bytes / plain_bytes:.3f} | {equal} |"
    )


def main() -> None:
    torch.set_num_threads(1)
    print("| model | plain | by hand: peak | FLOPs | time | recoup there: peak | FLOPs | time | floor | bits |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or MODELS:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
