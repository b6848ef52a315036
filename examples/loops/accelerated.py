"""Accelerate's loop: python examples/loops/accelerated.py"""

import torch
from accelerate import Accelerator
from torch import nn

from recoup.integrations.accelerate import fit as fit_accelerated


def train(budget=None):
    torch.manual_seed(0)
    accelerator, losses = Accelerator(cpu=True), []
    layers = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
    model, x = nn.Sequential(*layers), torch.randn(128, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)

    def loss_of(output, batch):
        return output.square().mean()

    fit = None
    if budget:
        fit = fit_accelerated(accelerator, model, x, loss=loss_of, budget=budget, optimizer=optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model(x), x)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, fit


if __name__ == "__main__":
    print(train("85%")[1])
