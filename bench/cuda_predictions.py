"""Predictions of a plan made without a card against the allocator of the CUDA build."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from bench.gpu_models import WORKLOADS, Autocast, gpt2


@dataclasses.dataclass
class Case:
    model: nn.Module
    batch: Any
    loss: Any
    layers: list[str]
    optimizer: type[torch.optim.Optimizer] | None


def make(name: str, device: torch.device, small: bool) -> Case:
    if name.startswith("gpt2"):
        work = gpt2(device, small=small, dropout=0.1 if name == "gpt2-dropout" else 0.0)
        if name == "gpt2-autocast":
            inner, loss = Autocast(work.model), work.loss

            return Case(inner, work.batch, loss, [f"model.{p}" for p in work.layers], torch.optim.AdamW)
    else:
        work = WORKLOADS[name](device, small=small)
    return Case(work.model, work.batch, work.loss, work.layers, torch.optim.AdamW)


NAMES = ("gpt2-dropout", "gpt2-autocast", *WORKLOADS)
