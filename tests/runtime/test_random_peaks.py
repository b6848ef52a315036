"""Random programs under random plans: no step of a training takes more memory than the simulator predicts.

`RECOUP_FUZZ=99 RECOUP_FUZZ_FIRST=1000 pytest tests/runtime/test_random_peaks.py` tries 99 programs from number 1000 on.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator

import pytest
import torch

from recoup.capture.step import Objective
from recoup.errors import StepError
from recoup.evidence.memory import measure_peak
from recoup.evidence.step_bench import StepBench
from recoup.ir.decision import Decision, OpMark, Rebuild, Rederive
from recoup.planner.request import planner_for
from recoup.runtime.apply import apply_decisions
from tests.runtime import random_programs
from tests.runtime.test_held_fuzz import ops_of

FIRST, NUM = int(os.environ.get("RECOUP_FUZZ_FIRST", "0")), int(os.environ.get("RECOUP_FUZZ", "0"))
# Each took more once, and for a reason of its own.
SEEDS = range(FIRST, FIRST + NUM) if NUM else (5, 38, 105, 139, 158, 9008)
ROWS = 1024  # so that a tensor is large against what the simulator rounds
LARGEST_ROUNDING_BYTES = 4096


def _plans(seed: int, addresses: list[OpMark]) -> Iterator[tuple[Decision, ...]]:
    """Yields no plan, all that can be rederived, and three random plans by tensor."""
    yield ()
    yield (Rederive(path=""),)
    rng = random.Random(seed)
    for share in (0.0, 0.1, 0.4):
        starts, pieces = rng.choice([0.0, 0.03, 0.2]), rng.choice([0.0, 0.1, 0.3])
        marks = [
            dataclasses.replace(
                address,
                holds=rng.random() < share,
                begins_segment=rng.random() < starts,
                saves=rng.random() < 0.2,
                begins_piece=rng.random() < pieces,
                is_joint=rng.random() < 0.3,
            )
            for address in addresses
        ]
        yield (Rebuild(path="", marks=tuple(marks)),)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("seed", SEEDS)
def test_no_step_passes_its_predicted_peak(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_programs, "ROWS", ROWS)
    torch.manual_seed(seed)
    model, x = random_programs.Program(seed), torch.randn(ROWS, random_programs.WIDTH)
    model.varies = False
    addresses = ops_of(model, x, monkeypatch)
    objective = Objective(loss=lambda output, _: output)
    # The prices are measured: they say what workspaces ops take.
    options = {"optimizer": None, "device": None, "actions": ("rebuild", "rederive"), "cost": None}
    try:
        planner, _, _ = planner_for(model, (x,), objective=objective, **options)
    except StepError as error:  # it drew frozen weights and detached inputs alone
        pytest.skip(str(error))
    bench = StepBench(model, (x,), objective, None)
    for decisions in _plans(seed, addresses):
        predicted_bytes = planner.simulate(decisions).peak_bytes
        bench.restore()
        with apply_decisions(model, decisions):
            for _ in range(4):  # recorded, learned, and as its program has it
                bench.restore()
                peak_bytes = measure_peak(bench.step, device=bench.device, held_bytes=bench.held_bytes())
                assert peak_bytes <= predicted_bytes + LARGEST_ROUNDING_BYTES
