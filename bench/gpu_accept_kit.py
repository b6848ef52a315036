"""What the checks of `bench.gpu_accept` share: steps, gradients, limits of the allocator, plans by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import recoup
from bench.gpu_models import Workload
from recoup._torch import clear_cublas_workspaces, has_expandable_segments
from recoup.cost.devices import get_device
from recoup.cost.roofline import RooflineCost
from recoup.ir.decision import Rederive


class Failed(Exception):
    """A check's condition does not hold; its text says which."""


def require(condition: bool, text: str) -> None:
    """Raises `Failed` unless the condition holds."""
    if not condition:
        raise Failed(text)


def step(work: Workload, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
    """Runs a training step; returns its loss."""
    loss = work.loss(work.model(work.batch), work.batch)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    return loss.detach()


def gradients(work: Workload, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns the gradients of one step from a seed."""
    work.model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    step(work)
    found = {n: p.grad.detach().clone() for n, p in work.model.named_parameters() if p.grad is not None}
    work.model.zero_grad(set_to_none=True)
    return found


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference between two sets of gradients, relative to each one's largest value."""
    require(one.keys() == other.keys(), "different parameters got gradients")
    return max(float((one[n] - other[n]).abs().max() / one[n].abs().max().clamp_min(1e-30)) for n in one)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of gradients are the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """Lets torch reserve no more than so many bytes."""
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(nbytes / total, 1.0))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextlib.contextmanager
def segments(*, expandable: bool) -> Iterator[None]:
    """Has the allocator take segments of either kind; what it holds of others is given back."""

    def set_to(wanted: bool) -> None:
        gc.collect()
        clear_cublas_workspaces()
        torch.cuda.empty_cache()
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{wanted}")

    before = has_expandable_segments()
    set_to(expandable)
    try:
        yield
    finally:
        set_to(before)


class Block(nn.Module):
    """Attention with a mask or causal, and dropout."""

    def __init__(self, width: int, heads: int, masked: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.masked, self.dropout = heads, masked, dropout
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril() if self.masked else None
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, not self.masked)
        return x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout)


def by_hand(model: nn.Module, batch: Any, decisions: list[Any], loss: Any = None) -> Any:
    """Returns a plan with these decisions."""
    loss = loss or (lambda output, batch: output.float().square().mean())
    made = recoup.plan(model, batch, loss=loss, budget="100%", device="h100-sxm", actions=())
    return dataclasses.replace(made, decisions=(Rederive(path=""), *decisions))


def table_of(card: str) -> Any:
    """Returns prices from the device table, which need no measuring."""
    return RooflineCost(get_device(card or "h100-sxm"))
