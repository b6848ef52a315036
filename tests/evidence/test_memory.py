"""The meter counts what the step allocates, whatever else is freed meanwhile."""

from __future__ import annotations

import gc

import torch

from recoup.evidence.memory import measure_peak

CPU = torch.device("cpu")


class _Cycle:
    def __init__(self, num_bytes: int) -> None:
        self.itself, self.tensor = self, torch.empty(num_bytes, dtype=torch.uint8)


def test_garbage_of_an_earlier_step_that_goes_in_this_one_lowers_no_peak() -> None:
    def step() -> None:
        tensors = [torch.empty(1_000_000, dtype=torch.uint8)]
        gc.collect()
        tensors.append(torch.empty(1_000_000, dtype=torch.uint8))

    assert measure_peak(lambda: _Cycle(5_000_000) and None, device=CPU, held_bytes=0) == 5_000_000
    assert measure_peak(step, device=CPU, held_bytes=0) == 2_000_000
