"""A ResNet-50 with BatchNorm and in-place ReLU: a TARGET for recoup."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a residual."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.reduce = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.expand = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [batch, inputs, height, width] to [batch, 4 * width, height / stride, width / stride]."""
        y = self.relu(self.norm1(self.reduce(x)))
        y = self.relu(self.norm2(self.conv(y)))
        y = self.norm3(self.expand(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """Four stages of bottlenecks, an average, a linear head."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages: list[nn.Module] = []
        inputs = 64
        for level, depth in enumerate(depths):
            width = 64 * 2**level
            blocks = []
            for index in range(depth):
                blocks.append(Bottleneck(inputs, width, 2 if index == 0 and level > 0 else 1))
                inputs = 4 * width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Maps images [batch, 3, height, width] to logits [batch, classes]; labels are for the loss."""
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def target() -> dict[str, Any]:
    """Returns the model, images with labels, and cross entropy."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 160, 160, generator=generator)
    labels = torch.randint(0, 100, (8,), generator=generator)
    return {
        "model": ResNet(),
        "batch": (images, labels),
        "loss": lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
    }
