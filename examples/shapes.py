"""Batches of several lengths, a plan for each: python examples/shapes.py"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recoup.errors import BatchTooLarge
from recoup.integrations.shapes import fit_shapes

config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=192, num_attention_heads=2, vocab_size=128)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters())


def batch_of(length: int) -> dict[str, torch.Tensor]:
    """Returns four sequences of a length."""
    ids = torch.randint(0, 128, (4, length))
    return {"input_ids": ids, "labels": ids}


plans = fit_shapes(model, [batch_of(64), batch_of(256)], budget="75%", optimizer=optimizer)  # the largest first
for length in (64, 256, 60, 200):
    model(**batch_of(length)).loss.backward()  # under the plan of the smallest shape that covers it
    optimizer.step()
    optimizer.zero_grad()
try:
    model(**batch_of(1024))
except BatchTooLarge as error:  # before it ran
    print(error)
print(plans)
