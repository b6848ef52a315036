"""Adapters on a frozen model: python examples/loops/lora.py"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import recoup


def train(budget=None):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
    lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    model, losses = get_peft_model(GPT2LMHeadModel(config), lora).train(), []
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    ids = torch.randint(0, 64, (4, 64))
    batch = {"input_ids": ids, "labels": ids}
    fit = recoup.fit(model, batch, optimizer=optimizer, budget=budget) if budget else None
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, fit


if __name__ == "__main__":
    print(train("85%")[1])
