"""Random programs under random plans by tensor: the same bits, whatever is held."""

from __future__ import annotations

import os
import random
import warnings

import pytest
import torch
from torch import nn

from recoup.evidence.gradients import equal_values
from recoup.ir.held import Boundary, HeldPlan, OpAddress
from recoup.runtime.patch import unpatch
from recoup.runtime.rebuild import segments
from recoup.runtime.rebuild.apply_held import apply_held
from tests.runtime.random_programs import ROWS, WIDTH, Program

NUM = int(os.environ.get("RECOUP_FUZZ", "60"))


def ops_of(model: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[OpAddress]:
    """Returns the addresses of all ops of a step."""
    found: list[OpAddress] = []
    real = segments.HeldRecorder.before_op

    def before_op(self: segments.HeldRecorder, name: str) -> bool:
        frame = self._frames[-1]
        found.append(OpAddress(path=frame.path, call=self._calls[frame.path] - 1, ordinal=frame.ordinal, op=name))
        return real(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(segments.HeldRecorder, "before_op", before_op)
        patches = apply_held(model, HeldPlan())
        model(x)
        while patches:
            unpatch(patches.pop())
    return found


def train(seed: int, plan: HeldPlan | None, num_steps: int = 3) -> list[torch.Tensor]:
    """Returns gradients, buffers and the random stream after some steps."""
    torch.manual_seed(seed)
    model = Program(seed)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    patches = [] if plan is None else apply_held(model, plan)
    found = []
    for _ in range(num_steps):
        loss = model(x)
        loss.backward()
        found.append(loss.detach())
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 1e-3 * p.grad.clamp(-1, 1)
    while patches:
        unpatch(patches.pop())
    grads = [p.grad for p in [x, *model.parameters()] if p.grad is not None]
    return [*found, *grads, *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("seed", range(NUM))
def test_random_programs_under_random_plans(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MIN_BYTES", 0)
    torch.manual_seed(seed)
    addresses = ops_of(Program(seed), torch.randn(ROWS, WIDTH, requires_grad=True), monkeypatch)
    plain = train(seed, None)
    rng = random.Random(seed)
    for share in (0.0, 0.1, 0.4):
        held = tuple(a for a in addresses if rng.random() < share)
        starts = [a for a in addresses if rng.random() < rng.choice([0.0, 0.03, 0.2])]
        boundaries = tuple(Boundary(address=a, saves=rng.random() < 0.2) for a in starts)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*takes a step that its plan was not made for.*")
            planned = train(seed, HeldPlan(held=held, boundaries=boundaries))
        assert len(plain) == len(planned)
        assert all(map(equal_values, plain, planned))
