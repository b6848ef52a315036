"""Batch norm whose statistics are those of all processes, on two CPU processes; run by `test_stateful.py`.

    python -m tests.runtime.synchronised RANK FILE

torch's own SyncBatchNorm takes tensors on accelerators only; this one has the same buffers and the same collectives
(a sum of sums in forward, a sum of gradients in backward) and is a `_BatchNorm` as that one is.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce

from recoup.ir.decision import Recompute
from recoup.runtime import execution_context
from recoup.runtime.apply import apply_decisions
from tests.runtime.stateful import BATCH, WIDTH, Mlp, Tower, differing, seeded, train


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    def _check_input_dim(self, x: torch.Tensor) -> None:
        assert x.dim() == 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = all_reduce(torch.cat([x.sum(0), x.square().sum(0), x.new_tensor([float(len(x))])]))
        count = sums[-1].detach()
        mean = sums[:WIDTH] / count
        variance = sums[WIDTH:-1] / count - mean.square()
        if self.training:
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean.detach(), self.momentum)
            self.running_var.lerp_(variance.detach(), self.momentum)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class Block(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = SyncBatchNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def main(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)

    def batch(i: int) -> torch.Tensor:
        return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2 * i + rank))

    def make() -> nn.Module:
        return Tower(*(Block() for _ in range(3)))

    expected = train(seeded(make), batch)
    model = seeded(make)
    with apply_decisions(model, [Recompute(path=f"blocks.{i}") for i in range(3)]):
        found = train(model, batch)
    assert differing(expected, found) == [], differing(expected, found)
    assert execution_context.counters()[0] == 15
    assert not torch.equal(expected["blocks.0.norm.running_mean"], torch.zeros(WIDTH))
    other = [torch.empty(WIDTH) for _ in range(2)]
    dist.all_gather(other, found["blocks.0.norm.running_mean"])
    assert torch.equal(*other)  # the statistics are those of both processes
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
