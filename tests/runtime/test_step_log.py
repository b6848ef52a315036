"""What steps did, counted for each plan on whatever thread backward runs."""

from __future__ import annotations

import threading

import torch
from torch import nn

from recoup.ir.decision import Recompute, Rederive
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions
from recoup.runtime.step_log import StepLog


def _model() -> nn.Sequential:
    block = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(3)]
    return nn.Sequential(*block)


def test_backward_on_another_thread_is_counted_for_the_plan_and_for_the_thread_of_its_forward() -> None:
    model, other = _model(), _model()
    x = torch.randn(32, 64)
    before = execution_context.counters()
    plan = [Rederive(path=""), Recompute(path="0"), Recompute(path="1", inside="rederive")]
    with apply_decisions(model, plan) as applied, apply_decisions(other, plan[:1]) as beside:
        for _ in range(2):
            start = applied.log
            loss = model(x).sum()
            thread = threading.Thread(target=loss.backward)  # as autograd does it for a GPU
            thread.start()
            thread.join()
            step = applied.log - start
            assert step.num_replays == 2 and step.num_rederived > 0
        total = applied.log
        assert total == StepLog(num_replays=4, num_rederived=2 * step.num_rederived)
        assert beside.log == StepLog()
        other(x).sum().backward()
        assert applied.log == total and beside.log.num_rederived > 0
    after = execution_context.counters()
    assert after[0] - before[0] == 4
    assert after[1] - before[1] == total.num_rederived + beside.log.num_rederived
