"""The same trace and the same costs give the same plan, byte for byte: on a busy machine, in any process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

from recoup.capture.spec import StepSpec
from recoup.cost.model import FlopsCost
from recoup.planner.driver import Planner, plan_for_budget
from tests.thorough import thorough

_PLAN = """
import json, torch
from torch import nn
import recoup
from recoup.cost.model import FlopsCost
torch.manual_seed(0)
def block():
    return nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.LayerNorm(32)
layers = [m for _ in range(3) for m in block()]
actions = ("rederive", "recompute", "offload")
for share in ("70%", "45%"):
    plan = recoup.plan(nn.Sequential(*layers), torch.randn(512, 32), budget=share, cost=FlopsCost(), actions=actions)
    print(json.dumps(plan.to_json()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", pytest.param("2", marks=thorough)])
def test_the_same_plan_in_any_process(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(_PLAN, {})  # in a process that may have planned much before
    here = capsys.readouterr().out
    assert here.count("\n") == 2 and json.loads(here.splitlines()[0])["decisions"]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    assert subprocess.check_output([sys.executable, "-c", _PLAN], env=environment, text=True) == here


def test_the_same_plan_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)]
    model, batch = nn.Sequential(*blocks), torch.randn(256, 16)

    def made() -> str:
        planner = Planner(StepSpec(model=model, batch=batch), cost=FlopsCost(), actions=("rederive", "recompute"))
        plan, _ = plan_for_budget(planner, budget="55%", free_bytes=None, device="cpu")
        return json.dumps(plan.to_json())

    idle = made()
    ends = threading.Event()
    interval = sys.getswitchinterval()

    def spin() -> None:
        while not ends.is_set():
            sum(range(1000))

    busy = threading.Thread(target=spin)
    sys.setswitchinterval(
        interval / 100
    )  # between the two, at each op: how often does not matter, how long is waited for
    busy.start()
    # A processor a thousand times slower, too: no clock has a say.
    for clock in ("time", "perf_counter", "process_time", "thread_time", "monotonic"):
        whole = getattr(time, clock)
        monkeypatch.setattr(time, clock, lambda whole=whole: 1000 * whole())
    try:
        assert made() == idle
    finally:
        sys.setswitchinterval(interval)
        ends.set()
        busy.join()


class Cell(nn.Linear):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(h))


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(70):
            x = self.cell(x)
        return x.sum()


def notes(model: nn.Module, batch: torch.Tensor, actions: tuple[str, ...] | None, share: int = 60) -> list[str]:
    planner = Planner(StepSpec(model=model, batch=batch), cost=FlopsCost(), actions=actions)
    plan, _ = plan_for_budget(planner, budget=f"{share}%", free_bytes=None, device="cpu")
    assert plan.decisions
    return [note for note in plan.notes if "was not tried" in note]


@pytest.mark.slow
def test_what_was_asked_for_and_not_tried_is_said() -> None:
    torch.manual_seed(0)
    model, x = Unrolled(), torch.randn(256, 8)
    found = notes(model, x, ("recompute", "tile", "offload"))
    assert [note.split()[0] for note in found] == ["tile", "offload"]
    assert all("a loop over time is most of the step" in note for note in found)
    assert notes(model, x, None) == []  # nothing was asked for by name
    layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))))
    (head,) = notes(layers, torch.randn(512, 16), ("rederive", "recompute", "tile"), share=85)
    assert head.startswith("tile was not tried: no head")
