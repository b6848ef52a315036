"""LLaMA-7B with a frozen bf16 base and LoRA on queries and values, 32,768 tokens: a target for planning only.

recoup plan bench/llama_lora.py:make --device rtx-4090 --budget 24GB
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recoup.targets.huggingface import build
from recoup.targets.parse import HubTarget

RANK = 16
SEQ = 32768


class LoRA(nn.Module):
    """A frozen linear layer with a trained product of two small ones beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Linear(base.in_features, RANK, bias=False, **like)
        self.up = nn.Linear(RANK, base.out_features, bias=False, **like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


def make() -> dict[str, Any]:
    """Returns the model on `meta` and a batch of one example."""
    target = HubTarget(model_type="llama", overrides=())
    model, batch = build(target, batch=1, seq=SEQ, image=None, dtype=torch.bfloat16, device="meta")
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoRA(layer.self_attn.v_proj)
    return {"model": model, "batch": batch, "optimizer": torch.optim.AdamW}
