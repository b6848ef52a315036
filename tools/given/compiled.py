"""What the page takes from its reader."""

import torch
from torch import nn

import recoup

model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
batch = torch.randn(32, 64)
