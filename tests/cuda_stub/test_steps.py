"""Planned steps in training: no error, no wait of the host for the device, counts that are right."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from recoup.ir.decision import Decision, Offload, Rebuild, Recompute, Rederive
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild.step_run import StepRun
from tests.cuda_stub.kit import stub
from tests.cuda_stub.models import CASES

PLANS = ("rederive", "recompute", "both", "keep", "span", "offload", "offload-inputs")


def _decisions(kind: str, num_blocks: int) -> list[Decision]:
    paths = [str(i) for i in range(num_blocks)]
    return {
        "rederive": [Rederive(path="")],
        "recompute": [Recompute(path=p) for p in paths],
        "both": [Rederive(path=""), *(Recompute(path=p, inside="rederive") for p in paths[:-1])],
        "keep": [Recompute(path=p, keep=("attention",)) for p in paths],
        "span": [Recompute(path=paths[0], span=tuple(paths[1:]))],
        "offload": [Offload(path=p) for p in paths],
        "offload-inputs": [Recompute(path=p, offload=True) for p in paths],
    }[kind]


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).float().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True).step()
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("plan", PLANS)
def test_twenty_steps_run_and_wait_for_nothing(case: str, plan: str) -> None:
    make, batch = CASES[case]
    model, x = make(), batch()
    with contextlib.ExitStack() as stack:
        if case == "cnn":
            stack.enter_context(torch.backends.cudnn.flags(enabled=True, benchmark=False))
        _step(model, x)
        with stub.counting() as plain:
            _step(model, x)
        applied = stack.enter_context(apply_decisions(model, _decisions(plan, len(model))))
        _step(model, x)  # pinned memory is taken once
        before = applied.log
        with stub.counting() as seen:
            for _ in range(20):
                _step(model, x)
        log = applied.log - before
    for what in ("syncs", "event_syncs"):
        assert seen[what] == 20 * plain[what], what
    assert seen["host_allocs"] == 0
    if plan.startswith("offload"):
        assert applied.moves is not None and applied.moves.bytes_out == applied.moves.bytes_back
        assert applied.moves.bytes_out > 0 or case != "perceptron"  # elsewhere storages are small
    else:
        assert seen["copies_to_host"] == 20 * plain["copies_to_host"]
    if plan == "rederive":
        assert log.num_rederived > 0
    if plan in ("recompute", "both", "keep", "offload-inputs"):
        assert log.num_replays == 20 * (len(model) - (plan == "both"))
        assert seen["launches"] > 20 * plain["launches"]


class _WithDropout(nn.Module):
    """Blocks with dropout, whose result is indexed whole, as language models index the positions of their logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(torch.tanh(layer(x)), 0.1)
        return torch.sin(x[:, slice(0, None), :]).pow(2)


@pytest.mark.parametrize("decision", [Rebuild(path=""), Rederive(path="")])
def test_steps_with_dropout_follow_a_program(decision: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[StepRun] = []
    real = StepRun.__init__

    def init(self: StepRun, *args: object) -> None:
        real(self, *args)  # type: ignore[arg-type]
        followed.append(self)

    monkeypatch.setattr(StepRun, "__init__", init)
    model, x = _WithDropout().cuda(), torch.empty(4, 128, 64, device="cuda")
    with apply_decisions(model, [decision]) as applied:
        for _ in range(4):
            _step(model, x)
        assert applied.log.num_rederived > 0
    assert len(followed) == 3
    assert all(run.is_done for run in followed)
