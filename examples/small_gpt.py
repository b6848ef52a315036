"""A GPT of four layers that is planned in seconds: the TARGET of the manual's commands."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH, TOKENS = 2048, 128, 128


class SmallGPT(nn.Module):
    """Embeddings, pre-norm transformer layers with a causal mask, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(TOKENS, WIDTH))
        layer = {"dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, **layer) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(TOKENS), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns logits, [batch, tokens, VOCABULARY]."""
        x = self.tokens(ids) + self.positions
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


def target(batch: int = 8) -> dict[str, Any]:
    """Returns the model, random ids, the next-token loss and an optimizer."""
    ids = torch.randint(0, VOCABULARY, (batch, TOKENS + 1))

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    inputs, targets = ids[:, :-1], ids[:, 1:]
    return {"model": SmallGPT(), "inputs": inputs, "targets": targets, "loss": loss, "optimizer": torch.optim.AdamW}
