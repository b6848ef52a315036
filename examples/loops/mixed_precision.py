"""Autocast, a GradScaler, clipping and accumulation: python examples/loops/mixed_precision.py"""

import torch
from torch import nn

import recoup


def train(budget=None):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model, criterion, losses, fit = nn.Sequential(*layers, nn.Linear(64, 10)), nn.CrossEntropyLoss(), [], None
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", init_scale=64.0)
    batches = [(torch.randn(128, 64), torch.randint(0, 10, (128,))) for _ in range(4)]
    if budget:
        x, y = batches[0]
        step = {"autocast": torch.bfloat16, "scaler": scaler, "accumulate": 4, "optimizer": optimizer}
        fit = recoup.fit(model, inputs=x, targets=y, loss=criterion, budget=budget, **step)
    for _ in range(20):
        for x, y in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = criterion(model(x), y) / 4
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, fit


if __name__ == "__main__":
    print(train("85%")[1])
