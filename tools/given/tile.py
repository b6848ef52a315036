"""What the page takes from its reader: a layer, its input, hidden states, a head and labels."""

import torch
from torch import nn

hidden = torch.randn(2, 64, 32, requires_grad=True)
labels = torch.randint(0, 256, (2, 64))
head = nn.Linear(32, 256, bias=False)
layer = nn.Module()
layer.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
ref = nn.Module()
ref.lm_head = nn.Linear(32, 256, bias=False).requires_grad_(False)
ref_hidden = torch.randn(2, 64, 32)
x = torch.randn(2, 64, 32)
