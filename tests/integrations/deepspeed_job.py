"""Run by each of two gloo ranks: the real DeepSpeed on a CPU, its checkpointing and its engine, beside recoup's."""

from __future__ import annotations

import copy
import inspect
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recoup.integrations import adapters
from recoup.ir.decision import Recompute, Rederive
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions
from tests.models import Stack

PLAN = [
    Rederive(path=""),
    *(Recompute(path=f"layers.{i}", inside="rederive") for i in range(3)),
]
ZERO = {
    "no ZeRO": {"stage": 0},
    "ZeRO-1": {"stage": 1},
    "ZeRO-2": {"stage": 2},
    "ZeRO-3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "ZeRO-3, small ones kept": {"stage": 3},
}


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


def losses(model: nn.Module, step: Any, rank: int) -> list[float]:
    torch.manual_seed(1 + rank)
    return [step(model, torch.randn(64, 32).requires_grad_()) for _ in range(4)]


def by_hand(model: nn.Module, x: torch.Tensor) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(x)
    loss.backward()
    optimizer.step()
    model.zero_grad()
    return float(loss)


def by_engine(engine: Any, x: torch.Tensor) -> float:
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss)


def names(deepspeed_checkpointing: Any) -> dict[str, Any]:
    """Returns the parameters of DeepSpeed's functions and of ours, and the losses of a training with either."""
    result: dict[str, Any] = {}
    for name in ("configure", "checkpoint"):
        both = (inspect.signature(getattr(m, name)).parameters for m in (adapters, deepspeed_checkpointing))
        result[f"parameters of {name}"] = [[[p.name, str(p.kind)] for p in s.values()] for s in both]
    adapters.configure(None, num_checkpoints=4)
    deepspeed_checkpointing.configure(None, num_checkpoints=4)
    plain = lambda function, *args: function(*args)  # noqa: E731
    ways = {"plain": plain, "theirs": deepspeed_checkpointing.checkpoint, "ours": adapters.checkpoint}
    result["by hand"] = {name: losses(ByHand(how), by_hand, 0) for name, how in ways.items()}
    return result


def engines(rank: int) -> dict[str, Any]:
    """Returns for each ZeRO stage the losses without and with a plan, and the regions that were run twice."""
    import deepspeed

    torch.manual_seed(0)
    base = Stack()
    result: dict[str, Any] = {}
    for zero, options in ZERO.items():
        result[zero] = {}
        for name, decisions in {"plain": [], "planned": PLAN}.items():
            model = copy.deepcopy(base)
            before = execution_context.counters()
            with apply_decisions(model, decisions):
                engine, *_ = deepspeed.initialize(
                    model=model,
                    optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
                    config={
                        "train_micro_batch_size_per_gpu": 64,
                        "zero_optimization": options,
                        "zero_allow_untested_optimizer": True,
                        "zero_force_ds_cpu_optimizer": False,
                    },
                )
                result[zero][name] = losses(engine, by_engine, rank)
            after = execution_context.counters()
            result[zero][f"{name} twice"] = [after[0] - before[0], after[1] - before[1]]
    return result


def main(rank: int, port: int, out: str) -> None:
    """Entry of each process; rank 0 writes the results to `out`."""
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR="cpu")
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.runtime.activation_checkpointing import checkpointing

    # Else it compiles an op for inference when the process group starts, for a minute or more.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    result = {**names(checkpointing), "engine": engines(rank)}
    if rank == 0:
        Path(out).write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # At the interpreter's own end a thread that DeepSpeed or gloo left running aborts the process now and then.
    os._exit(0)
