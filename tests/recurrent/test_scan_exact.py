"""Whatever the schedule, a scan leaves behind what the plain loop does, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.recurrent.helpers import NETWORKS, differing, train_once

pytestmark = pytest.mark.slow

OPTIONS: list[dict[str, Any]] = [
    {},
    {"chunk": 1},
    {"chunk": 100},
    {"slots": 1},
    {"slots": 3},
    {"budget": "80%"},
    {"budget": 20_000},
    {"slots": 3, "rederive": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_bit_equal(name: str, options: dict[str, Any]) -> None:
    make, sizes = NETWORKS[name]
    torch.manual_seed(0)
    network = make()
    for num_steps in (1, 2, 3, 19):
        if "80%" in options.values() and num_steps < 19:
            continue  # below what one step needs
        expected, _ = train_once(network, sizes, num_steps, None)
        found, report = train_once(network, sizes, num_steps, options)
        assert differing(expected, found) == [], num_steps
        assert report.evaluations == report.predicted_evaluations


@pytest.mark.parametrize("outputs", ["sum", "mean", "last"])
@pytest.mark.parametrize("name", NETWORKS)
def test_reduced_outputs(name: str, outputs: str) -> None:
    make, sizes = NETWORKS[name]
    torch.manual_seed(0)
    network = make()
    expected, _ = train_once(network, sizes, 11, None, outputs)
    found, _ = train_once(network, sizes, 11, {"slots": 2}, outputs)
    assert differing(expected, found) == []
