"""Small models and ways to run a step on them, shared by the tests."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    """Pre-norm MLP block with dropout and a residual."""

    def __init__(self, width: int, *, batch_norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if batch_norm else nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(self.drop(self.act(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks in a list, a scalar out."""

    def __init__(self, width: int = 32, depth: int = 4, *, batch_norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, batch_norm=batch_norm) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class ConvNet(nn.Module):
    """BatchNorm, in-place ReLU, a residual."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.stem(x)))
        x = self.relu(self.body(x) + x)
        return self.head(x.mean((2, 3)))


def make(kind: str) -> tuple[nn.Module, Any, Any]:
    """Returns (model, batch, loss) of a kind, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "stack":
            return Stack(), torch.randn(64, 32), None
        if kind == "batch-norm":
            return Stack(batch_norm=True), torch.randn(64, 32), None
        if kind == "conv":
            net = _Labelled(ConvNet())
            return net, (torch.randn(4, 3, 24, 24), torch.tensor([0, 1, 2, 3])), _cross_entropy
        if kind == "gpt2":
            from transformers import GPT2Config, GPT2LMHeadModel

            config = GPT2Config(
                n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=0
            )
            ids = torch.randint(0, 64, (2, 48))
            return GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}, None
        if kind == "llama":
            from transformers import LlamaConfig, LlamaForCausalLM

            config = LlamaConfig(
                num_hidden_layers=3, hidden_size=32, intermediate_size=96, num_attention_heads=2, vocab_size=64
            )
            ids = torch.randint(0, 64, (2, 48))
            return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}, None
    raise ValueError(kind)


def _cross_entropy(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1])


class _Labelled(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.net(x)


KINDS = ("stack", "batch-norm", "conv", "gpt2", "llama")


def step(model: nn.Module, batch: Any, loss: Any = None, *, seed: int = 1) -> list[torch.Tensor]:
    """Runs one training step and returns everything it leaves: loss, gradients, buffers, the next random number."""
    from recoup.capture.step import Objective

    torch.manual_seed(seed)
    model.zero_grad()
    value = Objective(loss=loss).run(model, batch)  # holds no logits, as trainers do
    value.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [value.detach(), *gradients, *(b.clone() for b in model.buffers()), torch.rand(2)]


def plain_step(model: nn.Module, batch: Any, loss: Any = None, *, seed: int = 1) -> list[torch.Tensor]:
    """The same on a copy, without a plan."""
    from recoup.runtime.apply import plain

    with plain(model):
        twin = copy.deepcopy(model)
        with plain(twin):
            return step(twin, batch, loss, seed=seed)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether two steps left the same bits."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
