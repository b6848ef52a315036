"""Steps that draw from python's or numpy's random numbers, and which draws of them are tried."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.capture.draws import EXTREMES, Draw, Streams, Words, draw_from


@pytest.fixture(autouse=True)
def _streams() -> Any:
    random.seed(0)
    np.random.seed(0)
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


class Blocks(nn.Module):
    def __init__(self, num: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(num)
        )


class Dropped(Blocks):
    """Layers that are dropped by chance; if all of them are, nothing is trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if random.random() >= 0.1:
                x = x + block(x)
        return x


class Repeated(Blocks):
    """As many rounds as a stream of numbers says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.blocks[0](x)
        while random.random() < 0.5:
            x = x + self.blocks[0](x)
        return x


def squares(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


def test_layers_that_are_dropped_by_chance_are_planned_for_all_of_them() -> None:
    model, batch = Dropped(), torch.randn(128, 32)
    peaks = []
    for seed in range(4):
        random.seed(seed)
        peaks.append(recoup.plan(model, batch, budget="100%", loss=squares).predicted.plain_peak_bytes)
    assert len(set(peaks)) == 1
    whole = nn.Sequential(*model.blocks)
    assert peaks[0] > 0.9 * recoup.plan(whole, batch, budget="100%", loss=squares).predicted.plain_peak_bytes


def test_a_number_of_rounds_by_chance_is_one_that_may_come() -> None:
    """It was planned for 157 rounds, of a chance of 2 to the -156: any percentage of that was no budget."""
    model, batch = Repeated(1), torch.randn(128, 32)
    found = recoup.plan(model, batch, budget="100%", loss=squares)
    one = recoup.plan(nn.Sequential(*model.blocks), batch, budget="100%", loss=squares).predicted.plain_peak_bytes
    assert one < found.predicted.plain_peak_bytes < 16 * one


def _beta(x: torch.Tensor) -> torch.Tensor:
    share = np.random.beta(0.2, 0.2)
    return x * max(1, round(share * 10))  # of NaN, there is none


def _logarithm(x: torch.Tensor) -> torch.Tensor:
    return x * -math.log(random.random())


def _half_of_the_range(x: torch.Tensor) -> torch.Tensor:
    if not 0.001 < np.random.rand() < 0.999:
        raise ValueError("never in a training")
    return x


@pytest.mark.parametrize("mixed", [_beta, _logarithm, _half_of_the_range])
def test_a_step_is_planned_whatever_numbers_that_no_training_draws_do(mixed: Callable[..., torch.Tensor]) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)) for _ in range(3)])

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        x, target = batch
        return F.cross_entropy(model(mixed(x)), target)

    batch = torch.randn(128, 32), torch.randint(0, 32, (128,))
    assert recoup.plan(model, batch, budget="90%", step=step).predicted.plain_peak_bytes > 0


@pytest.mark.parametrize("draw", EXTREMES)
def test_there_are_as_many_extreme_numbers_as_were_drawn(draw: Draw) -> None:
    before = Streams.now()
    for _ in range(5):
        random.random()
    np.random.rand(3)
    words = before.drawn_until(Streams.now())
    assert words == Words(10, 6)
    draw_from(draw, words)
    drawn = [random.random() for _ in range(9)], np.random.rand(9).tolist()
    for numbers, num in zip(drawn, (5, 3), strict=True):
        near = [min(n, 1 - n) < 1e-5 for n in numbers]
        assert near == [True] * num + [False] * (9 - num)
        assert all((n < 0.5) == (draw == Draw.LOW) and 0 < n < 1 for n in numbers[:num])


def test_numbers_that_a_stream_has_left_are_seen() -> None:
    """numpy's state is the same until all of it is used up; only the place in it moves."""
    np.random.rand()
    random.random()
    before = Streams.now()
    np.random.rand()
    assert before.drawn_until(Streams.now()) == Words(0, 2)
    for _ in range(400):  # past the end of the state
        random.random()
    assert before.drawn_until(Streams.now()).python == 800


def test_another_stream_of_numpys_is_left_alone() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(7))
    try:
        assert Streams.now().numpy is None
        noted = np.random.get_state(legacy=False)
        draw_from(Draw.LOW, Words(4, 4))
        assert np.random.get_state(legacy=False) == noted
    finally:
        np.random.set_bit_generator(before)
