"""FairScale's, Megatron's and DeepSpeed's names over recoup's regions: python examples/other_names.py"""

import copy

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from recoup.integrations.adapters import checkpoint, checkpoint_wrapper, configure, recompute

config = GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=256, bos_token_id=0, eos_token_id=0, use_cache=False)
model = GPT2LMHeadModel(config).eval()
ids = torch.randint(0, 256, (4, 128))


def gradients(net: torch.nn.Module) -> list[torch.Tensor]:
    """Returns every gradient of one step."""
    net.zero_grad()
    net(input_ids=ids, labels=ids).loss.backward()
    return [p.grad.clone() for p in net.parameters()]


expected = gradients(model)
with recompute(model, recompute_modules=["mlp", "layernorm"]):  # Megatron: parts of every layer
    megatron = gradients(model)
wrapped = copy.deepcopy(model)
for block in wrapped.transformer.h:  # FairScale: a module
    checkpoint_wrapper(block)
configure(None, num_checkpoints=3)  # DeepSpeed: a function
hidden = torch.randn(4, 16, 64, requires_grad=True)
checkpoint(model.transformer.h[0].mlp, hidden).sum().backward()
equal = all(torch.equal(a, b) for a, b in zip(megatron + gradients(wrapped), expected + expected, strict=True))
print("gradients equal" if equal else "gradients differ")
