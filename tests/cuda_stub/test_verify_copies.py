"""What a verification compares lies on the host: parameters, gradients, state, and what replays are held to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup import _allocation
from recoup._torch import clear_cublas_workspaces
from recoup.cost.devices import get_device
from recoup.cost.roofline import RooflineCost
from recoup.evidence import replay_audit
from recoup.runtime.offload.transport import InlineTransport
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


def _limit_host(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> list[int]:
    """Has this process find so much host memory, less what a verification holds there; notes each answer."""
    held: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
    answers: list[int] = []

    def available() -> int:
        answers.append(nbytes - sum(copy.nbytes for copy in held.values()))
        return answers[-1]

    def noting(function: Callable[..., Any], of: Callable[[Any], Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = function(*args)
            held[len(answers)] = of(result)
            return result

        return call

    monkeypatch.setattr(_allocation, "_of_the_machine", available)
    monkeypatch.setattr(InlineTransport, "put", noting(InlineTransport.put, lambda handle: handle[0]))
    monkeypatch.setattr(replay_audit, "in_host_memory", noting(replay_audit.in_host_memory, lambda tensor: tensor))
    return answers


def _blocks() -> tuple[nn.Module, torch.Tensor, dict[str, Any]]:
    """A model whose weights take 24 MiB and whose plain step saves about 480 MiB."""
    blocks = (nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(3))
    model, x = nn.Sequential(*blocks).cuda(), torch.zeros(8192, 512, device="cuda")
    options = {"loss": lambda y, _: y.square().mean(), "optimizer": torch.optim.AdamW(model.parameters())}
    return model, x, options


@pytest.mark.filterwarnings("ignore::recoup.errors.InexactWarning")
def test_what_a_verification_moves_to_the_host_fits_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, options = _blocks()
    cost = RooflineCost(get_device("h100-sxm"))
    plan = recoup.plan(model, x, budget="min", device="cuda", actions=("recompute",), cost=cost, **options)
    answers = _limit_host(monkeypatch, 200 << 20)
    evidence = recoup.verify(model, plan, x, timed=False, **options)
    assert any("of 8192 examples" in note for note in evidence.notes), evidence.notes
    assert evidence.num_replays_compared > 0
    assert answers
    assert min(answers) > 0, "more was taken of the host than there was"


def test_a_host_too_small_for_a_copy_of_the_gradients_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, options = _blocks()
    _limit_host(monkeypatch, 20 << 20)
    # Before any step: where a step of the fit ran, its plan would have been said to be too large.
    with pytest.raises(recoup.errors.UsageError, match=r"24\.0 MiB of host memory, and 20\.0 MiB are available"):
        recoup.fit(model, x, budget="75%", device="cuda", timed=False, **options)
