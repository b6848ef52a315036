"""Noise prediction with an exponential average of the weights: python examples/loops/diffusion.py"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import recoup


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(100, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1)) for _ in range(4)
        )
        self.first, self.last = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x, t):
        h = self.first(x) + self.time(t)[:, :, None, None]
        for block in self.blocks:
            h = h + block(h)
        return self.last(h)


def loss_of(model, images):
    t, noise = torch.randint(0, 100, (len(images),)), torch.randn_like(images)
    keep = (1 - t / 100)[:, None, None, None]
    return (model(keep.sqrt() * images + (1 - keep).sqrt() * noise, t) - noise).square().mean()


def train(budget=None):
    torch.manual_seed(0)
    model, images, losses = Denoiser(), torch.randn(8, 3, 16, 16), []
    optimizer = torch.optim.AdamW(model.parameters())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    fit = recoup.fit(model, images, step=loss_of, optimizer=optimizer, budget=budget) if budget else None
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, images)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        losses.append(loss.item())
    return losses, fit


if __name__ == "__main__":
    print(train("85%")[1])
