"""DDP and FSDP2 around compiled blocks, on two gloo ranks."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import recoup
from tests.compiled.models import Blocks


def replicated(model: Blocks) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: Blocks) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model


def run_rank(rank: int, port: int, out: str) -> None:
    """Takes two accumulated steps of each wrapped model; the first rank writes the gradients' distance, and graphs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    batches = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for modules, wrap in ((["blocks.?"], replicated), ([], replicated), (["blocks.?"], sharded)):
        torch.compiler.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Blocks(num_blocks=2)
        for batch in batches:
            (model(batch) / 2).backward()
        expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        recoup.compile(model, budget="170KiB", compiled={"backend": "aot_eager", "modules": modules})
        wrapped = wrap(model)
        for _ in range(2):
            wrapped(batches[rank]).backward()
        got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in got.items()}
        distance = max(float((whole[n] / 2 - e).abs().max()) for n, e in expected.items())
        found.append(f"{distance} {counters['stats']['unique_graphs']}")
    if rank == 0:
        Path(out).write_text("\n".join(found))
    del model, wrapped, got, whole  # what has threads of its own goes before the interpreter does
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_gradients_are_the_mean_over_ranks(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run_rank, (port, str(tmp_path / "found")), nprocs=2)
    found = [line.split() for line in (tmp_path / "found").read_text().splitlines()]
    assert len(found) == 3
    for distance, num_graphs in found:
        assert float(distance) < 1e-6 and int(num_graphs) > 0
