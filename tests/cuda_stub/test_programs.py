"""On a GPU steps with dropout, BatchNorm and autocast follow programs, in no more memory than the record takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recoup.ir.decision import Decision, Rebuild, Rederive
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild.calls import Calls
from recoup.runtime.rebuild.step_run import StepRun

pytest.importorskip("tests.cuda_stub.kit")


class _Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(nn.Linear(256, 256) for _ in range(3)), nn.LayerNorm(256)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(self.norm(x))), 0.1)
        return x.float().square().mean()


class _BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 8, 32, 32)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + F.relu(norm(convolution(x)), inplace=True)
        return x.square().mean()


@pytest.mark.parametrize("plan", [Rederive(path=""), Rebuild(path="")], ids=lambda plan: plan.action)
@pytest.mark.parametrize(("kind", "is_mixed"), [(_Dropout, False), (_Dropout, True), (_BatchNorm, False)])
def test_steps_follow_programs(
    kind: type[nn.Module], is_mixed: bool, plan: Decision, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[bool] = []
    real = Calls.end

    def end(self: Calls, key: Any, run: Any) -> None:
        followed.append(isinstance(run, StepRun) and run.is_done)
        real(self, key, run)

    monkeypatch.setattr(Calls, "end", end)
    model, x = kind().cuda(), torch.randn(4096, 256, device="cuda")
    peaks = []
    with apply_decisions(model, [plan]):
        for _ in range(6):
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16, enabled=is_mixed):
                loss = model(x)
            loss.backward()
            model.zero_grad()
            peaks.append(torch.cuda.max_memory_allocated())
    assert followed[-3:] == [True] * 3
    assert max(peaks[2:]) <= peaks[1]  # the first step also makes workspaces
