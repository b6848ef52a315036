"""DDP around compiled blocks, on two gloo ranks."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

import recoup
from tests.compiled.models import Blocks


def run_rank(rank: int, port: int, out: str) -> None:
    """Takes two accumulated steps of each model wrapped by DDP; the first rank writes the gradients' distance."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    batches = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for modules in (["blocks.?"], []):
        torch.manual_seed(0)
        model = Blocks(num_blocks=2)
        for batch in batches:
            (model(batch) / 2).backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        recoup.compile(model, budget="500KiB", compiled={"backend": "aot_eager", "modules": modules})
        wrapped = DistributedDataParallel(model)
        for _ in range(2):
            wrapped(batches[rank]).backward()
        got = [p.grad for p in model.parameters() if p.grad is not None]
        found.append(max(float((g / 2 - e).abs().max()) for g, e in zip(got, expected, strict=True)))
    if rank == 0:
        Path(out).write_text(" ".join(map(str, found)))
    dist.destroy_process_group()


@pytest.mark.slow
def test_gradients_are_the_mean_over_ranks(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run_rank, (port, str(tmp_path / "found")), nprocs=2)
    distances = [float(text) for text in (tmp_path / "found").read_text().split()]
    assert len(distances) == 2 and max(distances) < 1e-6
