"""RWKV, its recurrence over time as transformers runs it: recoup fit examples/today/rwkv.py --budget 60%"""

import torch
from transformers import RwkvConfig, RwkvForCausalLM


def target(batch=4, seq=16):
    """Returns a small RWKV and token ids."""
    torch.manual_seed(0)
    config = RwkvConfig(vocab_size=256, hidden_size=32, num_hidden_layers=2, context_length=seq, use_cache=False)
    ids = torch.randint(0, 256, (batch, seq))
    return {"model": RwkvForCausalLM(config).train(), "batch": {"input_ids": ids, "labels": ids}}
