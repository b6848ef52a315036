"""What the README takes from its reader: a model that returns its loss, batches of it, and a loop's own names."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import recoup

config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randint(0, 64, (4, 32))
y = x.roll(-1, 1)
batch = {"input_ids": x, "labels": x}
loader = [batch]


def criterion(output, targets):
    """Returns the loss of logits."""
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def compute_loss(model, batch):
    """Returns the loss of a batch."""
    return model(**batch).loss
