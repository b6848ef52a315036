"""What runs in a process of its own: the real DeepSpeed on a CPU, its checkpointing and its engine, beside recoup's."""

from __future__ import annotations

import copy
import inspect
import os
from typing import Any

import torch
from torch import nn

from recoup.engine import activity
from recoup.engine.handle import apply_decisions
from recoup.integrations import adapters
from recoup.ir.plan import Decision
from tests.models import Stack


class ByHand(nn.Module):
    """A stack that calls somebody's `checkpoint` on each layer, as DeepSpeed's users write it."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stack, self.how = Stack(), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.stack.layers:
            x = self.how(layer, x)
        return self.stack.head(x).square().mean()


def losses(model: nn.Module, step: Any) -> list[float]:
    torch.manual_seed(1)
    return [step(model, torch.randn(64, 32).requires_grad_()) for _ in range(4)]


def main() -> dict[str, Any]:
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", DS_ACCELERATOR="cpu")
    os.environ.setdefault("MASTER_PORT", "29577")
    import deepspeed
    from deepspeed.runtime.activation_checkpointing import checkpointing as theirs

    deepspeed.init_distributed(dist_backend="gloo")
    result: dict[str, Any] = {"version": deepspeed.__version__}
    for name in ("configure", "checkpoint"):
        ours, other = (inspect.signature(getattr(module, name)).parameters for module in (adapters, theirs))
        result[f"parameters of {name}"] = [[[p.name, str(p.kind)] for p in s.values()] for s in (ours, other)]

    def by_hand(model: nn.Module, x: torch.Tensor) -> float:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(x)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return float(loss)

    adapters.configure(None, num_checkpoints=4)
    theirs.configure(None, num_checkpoints=4)
    plain = lambda function, *args: function(*args)  # noqa: E731
    ways = {"plain": plain, "theirs": theirs.checkpoint, "ours": adapters.checkpoint}
    result["by hand"] = {name: losses(ByHand(how), by_hand) for name, how in ways.items()}

    def by_engine(engine: Any, x: torch.Tensor) -> float:
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        return float(loss)

    torch.manual_seed(0)
    base = Stack()
    result["engine"] = {}
    for name, decisions in {
        "plain": [],
        "planned": [Decision(path=f"layers.{i}", action="recompute", inside="rederive") for i in range(4)],
    }.items():
        model = copy.deepcopy(base)
        before = activity.counters()[0]
        with apply_decisions(model, decisions):
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                config={"train_micro_batch_size_per_gpu": 64, "gradient_accumulation_steps": 1},
            )
            result["engine"][name] = losses(engine, by_engine)
        result["engine"][f"{name} regions"] = activity.counters()[0] - before
    return result
