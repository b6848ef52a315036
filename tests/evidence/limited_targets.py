"""Steps of a few hundred MiB, nearly all of it saved for backward: targets of the command line."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Made = dict[str, Any]


def llama() -> Made:
    """Returns a Llama on 16 x 256 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=128, intermediate_size=384, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=1000, max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    ids = _tokens(1000, 16, 256)
    return {"model": LlamaForCausalLM(config).train(), "batch": {"input_ids": ids, "labels": ids}}


def gpt2() -> Made:
    """Returns a GPT-2 on 14 x 192 tokens, with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=3, n_embd=128, n_head=4, vocab_size=1000, n_positions=256, bos_token_id=0, eos_token_id=0
    )
    ids = _tokens(1000, 14, 192)
    return {"model": GPT2LMHeadModel(config).train(), "batch": {"input_ids": ids, "labels": ids}}


def t5() -> Made:
    """Returns a T5 on 20 x 128 and 20 x 128 tokens, with dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=1000, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    ids = _tokens(1000, 20, 128)
    return {"model": T5ForConditionalGeneration(config).train(), "batch": {"input_ids": ids, "labels": ids}}


def resnet() -> Made:
    """Returns a narrow ResNet of bottleneck blocks on 20 images of 160 x 160."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=32, hidden_sizes=[128, 128, 256, 256], depths=[2, 2, 1, 1], num_labels=10)
    images = torch.randn(20, 3, 160, 160, generator=_generator())
    batch = {"pixel_values": images, "labels": torch.arange(20) % 10}
    return {"model": ResNetForImageClassification(config).train(), "batch": batch}


def unet() -> Made:
    """Returns a U-Net of three levels on 9 images of 128 x 128."""
    from examples.unet import UNet

    images = torch.randn(9, 3, 128, 128, generator=_generator())
    return {"model": UNet(16, 3), "batch": images, "loss": lambda output, batch: nn.functional.mse_loss(output, batch)}


def mlp() -> Made:
    """Returns a chain of linear layers on 32,768 rows: quick to plan, and 32 MiB a tensor."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())]
    rows = torch.randn(1 << 15, 256, generator=_generator())
    return {"model": nn.Sequential(*layers), "batch": rows, "loss": lambda output, batch: output.square().mean()}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape, generator=_generator())
