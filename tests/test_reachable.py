"""What a step can reach: globals that its code names, and none that an attribute only shares its name with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup._reachable import Reached, names_in
from recoup.evidence.memory import measure_peak, storage_bytes
from tests import models

table = torch.zeros(3)  # read as a global by `Reading`, as an attribute by `Own`
layer = (torch.randn(2048, 8), torch.randn(2048, 8))


class Reading(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + table.sum() + sum(float(t) for t in [models.torch.ones(()), *(table for _ in range(1))][1:])


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(x)
        return out


class Block(nn.Module):
    """Its layer has the name of a global, as `b` or `x` have in a script."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.layer(x)
        return out


@pytest.mark.parametrize(("model", "is_reached"), [(Reading(), True), (Own(), False)])
def test_a_global_is_reached_by_its_name_alone(model: nn.Module, is_reached: bool) -> None:
    assert (table in Reached({"model": model})) is is_reached


def test_names_of_a_functions_inner_functions_count() -> None:
    def outer(x: Any) -> Any:
        return [lambda: table + x.layer for _ in range(2)]

    names, attributes = names_in(outer.__code__)
    assert "table" in names and "layer" not in names
    assert "layer" in attributes


def test_a_batch_in_a_global_that_shares_an_attributes_name_takes_no_memory_of_a_region() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(4)))

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(output, batch["targets"] if isinstance(batch, dict) else batch)

    plan = recoup.plan(model, inputs=layer[0], targets=layer[1], loss=loss, budget="min", actions=("recompute",))
    held_bytes = storage_bytes([*model.parameters(), *layer])
    with recoup.apply(model, plan):
        for _ in range(2):
            peak = measure_peak(
                lambda: loss(model(layer[0]), layer[1]).backward(), device=torch.device("cpu"), held_bytes=held_bytes
            )
            assert peak <= plan.budget_bytes * 1.005
            model.zero_grad()
