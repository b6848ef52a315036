"""What a verification compares lies on the host: parameters, gradients, state, and what replays are held to."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import recoup
from recoup._torch import clear_cublas_workspaces
from recoup.cost.devices import get_device
from recoup.cost.roofline import RooflineCost
from recoup.thresholds import SAME_SHARE
from tests.cuda_stub.kit import stub

assert stub.is_active()


@pytest.mark.filterwarnings("ignore::recoup.errors.InexactWarning")
@pytest.mark.parametrize("actions", [("recompute",), ("rederive",), ("rebuild",)])
def test_a_verification_takes_no_more_of_the_card_than_a_step(actions: tuple[str, ...]) -> None:
    gc.collect()
    clear_cublas_workspaces()
    assert torch.cuda.memory_allocated() < 1 << 20, "a test before this one has left something on the card"
    # Weights, gradients and state are most of it: 24, 24 and 48 MiB; a copy of any would show.
    blocks = (nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(3))
    model, x = nn.Sequential(*blocks).cuda(), torch.zeros(2048, 512, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"loss": lambda y, _: y.square().mean(), "optimizer": optimizer}
    cost = RooflineCost(get_device("h100-sxm"))
    plan = recoup.plan(model, x, budget="85%", device="cuda", actions=actions, cost=cost, **options)
    assert plan.decisions
    evidence = recoup.verify(model, plan, x, timed=False, **options)
    assert evidence.peak_bytes <= plan.predicted.peak_bytes
    assert evidence.baseline_peak_bytes is not None
    assert evidence.baseline_peak_bytes <= plan.predicted.plain_peak_bytes * (1 + SAME_SHARE)  # an uncut block
