"""transformers' Trainer inside a byte budget: python examples/hf_trainer.py"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from recoup.integrations.transformers import RecoupCallback, fit

config = LlamaConfig(num_hidden_layers=3, hidden_size=64, intermediate_size=192, num_attention_heads=2, vocab_size=256)
model = LlamaForCausalLM(config)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (16, 128))]
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(folder, max_steps=4, per_device_train_batch_size=4, use_cpu=True, report_to=[])
    found = fit(model, args, data, budget="75%")  # the one line before the Trainer
    watching = RecoupCallback(found.plan)
    Trainer(model=model, args=args, train_dataset=data, callbacks=[watching]).train()
print(found)
print(watching.report())
