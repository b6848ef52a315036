"""Random ops that run again in a compiled step: from the state that they had, of their own card's generator."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import boxed_nop
from torch.utils._python_dispatch import TorchDispatchMode

import recoup
from tests.cuda_stub.kit import stub

assert stub.is_active()
Draws = list[tuple[str, tuple[int, ...], tuple[int, ...]]]
"""Of each random op its name, the seed and offset that it began with, and its input's shape."""
RANDOM = (
    torch.ops.aten.native_dropout.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
)


class Attending(nn.Module):
    """A residual block of attention and a product, both with dropout."""

    def __init__(self, width: int = 64, p: float = 0.1) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout.p)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        found: Tensor = x + self.dropout(self.down(self.dropout(nn.functional.gelu(self.up(x)))))
        return found


def model_and_batch(device: str = "cuda", blocks: int = 4) -> tuple[nn.Module, Tensor]:
    """Returns a model whose step is large beside the workspaces of cuBLAS."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Attending() for _ in range(blocks)], nn.Linear(64, 1)).to(device)
    return model, torch.empty(128, 256, 64, device=device)


def fitted(model: nn.Module, batch: Tensor, budget: str) -> Any:
    """Returns a fit by `aot_eager`."""
    options = {"loss": lambda out, _: out.square().mean(), "compiled": {"backend": "aot_eager"}}
    return recoup.fit(model, batch, budget=budget, timed=False, **options)  # type: ignore[arg-type]


def state(device: str) -> tuple[int, ...]:
    """Returns seed and offset of a card's generator."""
    return tuple(torch.cuda.get_rng_state(device).view(torch.int64).tolist())


class Watched(TorchDispatchMode):
    """Notes random ops, with the state that each begins with, also where it is given one."""

    supports_higher_order_operators = True

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.drawn = device, Draws()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._noting(func)(*args, **(kwargs or {}))

    def _noting(self, func: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if isinstance(func, torch._ops.HigherOrderOperator):
                args = tuple(self._noting(a) if isinstance(a, torch._ops.OpOverload) else a for a in args)
            elif func in RANDOM:
                self.drawn.append((func.name(), state(self.device), tuple(args[0].shape)))
            return func(*args, **kwargs)

        return run


class Watch:
    """Has `aot_eager` run its graphs below a mode, if there is one: around compiled code it would not be compiled."""

    mode: TorchDispatchMode | None = None

    def backend(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Runs a graph op by op, as torch's own."""
        run = boxed_nop(module, inputs)

        def watched(args: Any) -> Any:
            with self.mode or contextlib.nullcontext():
                return run(args)

        watched._boxed_call = True  # type: ignore[attr-defined]
        return watched


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Returns the loss of `fitted`."""
    return model(batch).square().mean()


def check_fit(budget: str, device: str, *, blocks: int = 4) -> None:
    """Asserts that compiled steps draw what eager ones do, and again in backward what they drew."""
    watch = Watch()
    model, batch = model_and_batch(device, blocks)
    with mock.patch("torch._dynamo.backends.debugging.boxed_nop", watch.backend):
        found = fitted(model, batch, budget)
    evidence = found.evidence
    assert evidence.ok and evidence.rng_equal and evidence.peak_bytes <= evidence.budget_bytes
    assert evidence.predicted_peak_bytes == pytest.approx(evidence.peak_bytes, rel=0.03)

    start, cpu = torch.cuda.get_rng_state(device), torch.get_rng_state()
    with found.applied.suspended(), Watched(device) as eager:
        for _ in range(4):
            loss_of(model, batch).backward()
    end = state(device)
    torch.cuda.set_rng_state(start, device)
    forward, backward = Draws(), list[Draws]()
    for calls in (1, 1, 2):  # the last time two graphs are alive at once
        watch.mode = seen = Watched(device)
        losses = [loss_of(model, batch) for _ in range(calls)]
        forward += seen.drawn
        for loss in losses:
            watch.mode = seen = Watched(device)
            loss.backward()
            backward.append(seen.drawn)
    watch.mode = None
    assert forward == eager.drawn and state(device) == end and torch.equal(torch.get_rng_state(), cpu)
    each = len(forward) // 4
    assert each == 4 * blocks
    for step, again in enumerate(backward):
        assert again and set(again) <= set(forward[step * each : (step + 1) * each])
    found.applied.remove()


@pytest.mark.parametrize("budget", ["70%", "min"])
def test_dropout_that_runs_again_draws_its_mask(budget: str) -> None:
    check_fit(budget, "cuda")


def test_dropout_on_the_second_card_draws_from_that_cards_generator(tmp_path: Path) -> None:
    library = tmp_path / "two_cards.so"
    source = Path(__file__).with_name("two_cards.cpp")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": f"{library}:{os.environ['LD_PRELOAD']}"}
    command = [sys.executable, "-m", "tests.cuda_stub.test_compiled_dropout"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("ok\n"), done.stdout + done.stderr  # the exit of a process is not ours to judge


def main() -> None:
    """Fits and trains on "cuda:1" while the first card is the current one."""
    torch.cuda.manual_seed_all(0)
    torch.rand(1, device="cuda:0")  # the two generators stand elsewhere
    check_fit("min", "cuda:1", blocks=2)
    assert torch.cuda.current_device() == 0
    print("ok", flush=True)


if __name__ == "__main__":
    main()
