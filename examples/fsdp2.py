"""FSDP2 on two processes, one plan on both: python examples/fsdp2.py (or torchrun --nproc-per-node 2)."""

import os

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import recoup
from recoup.integrations import distributed


def main(rank: int, world_size: int) -> None:
    """Plans on rank 0, applies everywhere, shards, trains."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, hidden_size=64, intermediate_size=192, vocab_size=256))
    ids = torch.randint(0, 256, (2, 128))
    batch = {"input_ids": ids, "labels": ids}
    plan = recoup.plan(model, batch, budget="75%", optimizer=torch.optim.AdamW) if rank == 0 else None
    distributed.apply(model, distributed.broadcast_plan(plan))  # before fully_shard, or after
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        (loss := model(**batch).loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(main, (2,), nprocs=2) if "RANK" not in os.environ else main(int(os.environ["RANK"]), 2)
