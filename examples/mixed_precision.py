"""fp16 autocast and a GradScaler inside a byte budget: python examples/mixed_precision.py"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import recoup
from recoup.integrations.precision import autocast_forward

device = "cuda" if torch.cuda.is_available() else "cpu"
config = GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=256, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).to(device)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler(device, init_scale=1024.0)
ids = torch.randint(0, 256, (4, 128), device=device)
batch = {"input_ids": ids, "labels": ids}
with autocast_forward(model, torch.float16):  # planned as it is trained: forward in autocast, backward outside
    found = recoup.fit(model, batch, budget="75%", optimizer=optimizer, timed=False)
for _ in range(3):
    with torch.autocast(device, torch.float16):
        loss = model(**batch).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print(found)
