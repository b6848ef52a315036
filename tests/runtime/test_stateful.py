"""Twelve models with state: five steps leave what plain steps leave, bit for bit, by explicit regions and by plans."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import recoup
from recoup.cost.model import FlopsCost
from recoup.ir.decision import Recompute
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions
from tests.runtime.stateful import STATEFUL, differing, everything, seeded, train


@pytest.mark.parametrize("inside", ["save", "rederive"])
@pytest.mark.parametrize("name", STATEFUL)
def test_regions(name: str, inside: str) -> None:
    make, batch, paths = STATEFUL[name]
    expected = train(seeded(make), batch)
    model = seeded(make)
    before = execution_context.counters()[0]
    with apply_decisions(model, [Recompute(path=p, inside=inside) for p in paths]):
        found = train(model, batch)
    assert differing(expected, found) == []
    assert execution_context.counters()[0] - before >= 5 * len(paths)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*took a step that its plan was not made for")  # some change their ways by step
@pytest.mark.parametrize("name", STATEFUL)
def test_plans_at_a_tight_budget(name: str) -> None:
    make, batch, _ = STATEFUL[name]
    expected = train(seeded(make), batch)
    model = seeded(make)
    untouched = everything(model)
    plan = recoup.plan(model, (batch(0),), cost=FlopsCost(), budget="min")
    assert differing(untouched, everything(model)) == []  # planning changed nothing, streams and state included
    with recoup.apply(model, plan):
        found = train(model, batch)
    assert differing(expected, found) == []
    assert plan.decisions, "the smallest budget needs a plan"


def test_a_large_buffer_is_exact_when_the_decision_names_it() -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(16, 16)
            self.register_buffer("table", torch.ones(256, 256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.table.mul_(0.9)
            return torch.tanh(self.fc(x)) * self.table[0, 0]

    def run(model: torch.nn.Module) -> list[torch.Tensor]:
        model(torch.ones(4, 16)).sum().backward()
        return [model[0].fc.weight.grad, model[0].table]

    expected = run(seeded(lambda: torch.nn.Sequential(Table())))
    model = seeded(lambda: torch.nn.Sequential(Table()))
    with (
        apply_decisions(model, [Recompute(path="0")]),
        pytest.raises(recoup.ReplayError, match=r"`table` was changed in place"),
    ):
        run(model)
    model = seeded(lambda: torch.nn.Sequential(Table()))
    with apply_decisions(model, [Recompute(path="0", buffers=("0.table",))]):
        assert all(torch.equal(a, b) for a, b in zip(expected, run(model), strict=True))


@pytest.mark.slow
def test_synchronised_batch_norm_on_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.runtime.synchronised"]
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meeting")],
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)


@pytest.mark.parametrize("path", ["0", "1", "1.0"])
def test_an_optimizer_that_steps_in_backward(path: str) -> None:
    """What a parameter's hook reaches, every other parameter here, is nothing that a region's forward reads."""

    def trained(decisions: list[Recompute]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)) for _ in range(3))
        )
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        with apply_decisions(model, decisions):
            for i in range(4):
                model(torch.full((4, 8), 0.1 * i)).square().sum().backward()
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, trained([]), trained([Recompute(path=path)])))
