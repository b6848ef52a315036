"""A byte budget for torch.compile: python examples/compiled.py"""

import torch
from transformers import ViTConfig, ViTForImageClassification

import recoup

size = {"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 2, "image_size": 64, "patch_size": 8}
model = ViTForImageClassification(ViTConfig(num_hidden_layers=2, hidden_dropout_prob=0.0, **size))
optimizer = torch.optim.AdamW(model.parameters())
batch = {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(0, 2, (8,))}
how = {"backend": "aot_eager"}  # or compiled=True: inductor
found = recoup.fit(model, batch, budget="75%", optimizer=optimizer, timed=False, compiled=how)
for step in range(3):  # the model is compiled in place
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")
