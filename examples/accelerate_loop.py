"""An Accelerate loop inside a byte budget: python examples/accelerate_loop.py"""

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

from recoup.integrations.accelerate import fit

accelerator = Accelerator(cpu=True, mixed_precision="bf16")
config = GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=256, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(0, 256, (4, 128))
batch = {"input_ids": ids, "labels": ids}
found = fit(accelerator, model, batch, budget="75%", optimizer=optimizer)  # before or after prepare
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(3):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print(found)
