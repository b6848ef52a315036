"""A mixture of experts, all of a layer in one fused product: recoup fit examples/today/experts.py --budget 60%"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def target(batch=4, seq=128):
    """Returns a Mixtral whose experts run by `grouped_mm`, with the router's loss, and token ids."""
    torch.manual_seed(0)
    config = MixtralConfig(num_hidden_layers=3, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    config.vocab_size, config.num_local_experts, config.num_key_value_heads = 256, 4, 2
    config.use_cache, config.output_router_logits = False, True
    model = MixtralForCausalLM._from_config(config, experts_implementation="grouped_mm")
    ids = torch.randint(0, 256, (batch, seq))
    return {"model": model.train(), "batch": {"input_ids": ids, "labels": ids}, "optimizer": torch.optim.AdamW}
