"""transformers' Trainer: python examples/loops/trainer.py"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from recoup.integrations.transformers import fit as fit_trainer


def train(budget=None):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (16, 64))]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=20, per_device_train_batch_size=4, use_cpu=True, report_to=[], logging_steps=1
        )
        fit = fit_trainer(model, args, data, budget=budget) if budget else None
        trainer = Trainer(model=model, args=args, train_dataset=data)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], fit


if __name__ == "__main__":
    print(train("85%")[1])
