"""What the page takes from its reader: a model, batches of any size, two towers and a loss of both."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import recoup

sizes = {"n_layer": 1, "n_embd": 256, "n_head": 2, "n_positions": 4096}
model = GPT2LMHeadModel(GPT2Config(vocab_size=50304, bos_token_id=0, eos_token_id=0, **sizes))
images, ids = torch.randn(128, 16), torch.randint(0, 64, (128, 8))
model.encode_image = nn.Linear(16, 8)
model.text = nn.EmbeddingBag(64, 8)
model.encode_text = lambda input_ids: model.text(input_ids)


def make_batch(examples, tokens):
    """Returns ids that are their own labels."""
    rows = torch.randint(0, 64, (examples, tokens))
    return {"input_ids": rows, "labels": rows}


def clip_loss(a, b):
    """Returns the contrastive loss of two sets of embeddings."""
    return nn.functional.cross_entropy(a @ b.T, torch.arange(len(a)))
