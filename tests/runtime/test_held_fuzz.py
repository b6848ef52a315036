"""Random programs under random plans by tensor: the same bits, whatever is held.

`RECOUP_FUZZ=500 RECOUP_FUZZ_FIRST=1000 pytest tests/runtime/test_held_fuzz.py` tries 500 programs from number 1000 on.
"""

from __future__ import annotations

import dataclasses
import os
import random
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from recoup.evidence.gradients import equal_values
from recoup.ir.decision import OpMark, Rebuild, Rederive
from recoup.runtime.apply import apply_decisions
from recoup.runtime.rebuild import apply_held, held_recorder, saved_tensor
from recoup.runtime.rebuild.marks import CallMarks
from tests.runtime.random_programs import ATTENTION, ROWS, WIDTH, Program

NUM = int(os.environ.get("RECOUP_FUZZ", "24"))
FIRST = int(os.environ.get("RECOUP_FUZZ_FIRST", "0"))
SEEDS = range(FIRST, FIRST + NUM)


class _NoneAnywhere(dict[Any, Any]):
    """Marks of a plan: no op has one, though any might."""

    def get(self, key: Any, default: Any = None) -> Any:
        return CallMarks({})


def ops_of(model: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[OpMark]:
    """Returns the addresses of all ops of a step that have a number."""
    found: list[OpMark] = []
    real = held_recorder.HeldRecorder.before_op

    def before_op(self: held_recorder.HeldRecorder, name: str, args: tuple[Any, ...]) -> OpMark | None:
        frame = self._frames[-1]
        if held_recorder.reads_numbers(args):
            found.append(OpMark(path=frame.path, call=self._calls[frame.path] - 1, ordinal=frame.ordinal, op=name))
        return real(self, name, args)

    with monkeypatch.context() as patch:
        patch.setattr(held_recorder.HeldRecorder, "before_op", before_op)
        patch.setattr(apply_held, "marks_of", lambda marks: _NoneAnywhere())
        with apply_decisions(model, [Rebuild(path="")]), _Behind():
            model(x)
    return found


class _Behind(TorchDispatchMode):
    """Behind another mode each op is recorded by itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def backward(loss: torch.Tensor, model: Program, x: torch.Tensor, kind: int) -> None:
    """Runs backward once, twice, on another thread, or through its own gradients."""
    if kind == 2:
        loss.backward(retain_graph=True)
        loss.backward()
    elif kind == 3:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    elif kind == 4 and all(step != ATTENTION for step, _ in model.steps):  # which has no second derivative
        wanted = [p for p in (x, *model.parameters()) if p.requires_grad]
        first = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        (loss + 1e-3 * sum(g.pow(2).sum() for g in first if g is not None)).backward()
    else:
        loss.backward()


def random_marks(
    addresses: list[OpMark], rng: random.Random, *, share: float, starts: float, pieces: float
) -> tuple[OpMark, ...]:
    """Returns a plan: a share of ops is held, others begin segments or pieces."""
    return tuple(
        dataclasses.replace(
            a,
            holds=rng.random() < share,
            begins_segment=rng.random() < starts,
            saves=rng.random() < 0.2,
            begins_piece=rng.random() < pieces,
            is_joint=rng.random() < 0.3,
        )
        for a in addresses
    )


def train(seed: int, plan: Rebuild | Rederive | None, num_steps: int = 5) -> list[torch.Tensor]:
    """Returns gradients, buffers and the random stream after some steps."""
    torch.manual_seed(seed)
    model = Program(seed)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    applied = apply_decisions(model, [] if plan is None else [plan])
    found = []
    for _ in range(num_steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=seed % 5 == 1):
            loss = model(x)
        backward(loss, model, x, seed % 5)
        found.append(loss.detach())
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 1e-3 * p.grad.clamp(-1, 1)
    applied.remove()
    grads = [p.grad for p in [x, *model.parameters()] if p.grad is not None]
    return [*found, *grads, *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs_under_random_plans(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_recorder, "MIN_BYTES", 0)
    torch.manual_seed(seed)
    addresses = ops_of(Program(seed), torch.randn(ROWS, WIDTH, requires_grad=True), monkeypatch)
    plain = train(seed, None)
    rng = random.Random(seed)
    for share in (0.0, 0.1, 0.4):
        starts, pieces = rng.choice([0.0, 0.03, 0.2]), rng.choice([0.0, 0.1, 0.3])
        marks = random_marks(addresses, rng, share=share, starts=starts, pieces=pieces)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*took a step that its plan was not made for.*")
            planned = train(seed, Rebuild(path="", marks=marks))
        assert len(plain) == len(planned)
        assert all(map(equal_values, plain, planned))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs_rederived(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_tensor, "MIN_BYTES", 0)
    plain, planned = train(seed, None), train(seed, Rederive(path=""))
    assert len(plain) == len(planned)
    assert all(map(equal_values, plain, planned))
