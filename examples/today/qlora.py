"""QLoRA, a base in bitsandbytes' 4 bits: recoup fit examples/today/qlora.py --budget 60%"""

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def quantized(linear):
    """Returns the layer with its weight in NF4, made whole in each product."""
    made = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4")
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")  # which quantizes


def target(batch=4, seq=128):
    """Returns a Llama whose layers are quantized, with LoRA of rank 8 on all of them, and token ids."""
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=3, hidden_size=64, intermediate_size=192, num_attention_heads=4)
    config.vocab_size, config.use_cache = 256, False
    model = LlamaForCausalLM(config)
    for path, module in list(model.model.layers.named_modules()):
        if isinstance(module, nn.Linear):
            model.model.layers.set_submodule(path, quantized(module))
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.1))
    ids = torch.randint(0, 256, (batch, seq))
    return {"model": model.train(), "batch": {"input_ids": ids, "labels": ids}, "optimizer": torch.optim.AdamW}
