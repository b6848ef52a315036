"""LoRA on a frozen base inside a byte budget: python examples/lora.py"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import recoup

config = GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=256, bos_token_id=0, eos_token_id=0)
lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
model = get_peft_model(GPT2LMHeadModel(config), lora)
optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
ids = torch.randint(0, 256, (4, 128))
batch = {"input_ids": ids, "labels": ids}
found = recoup.fit(model, batch, budget="80%", optimizer=optimizer, timed=False)
for _ in range(3):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(found)
