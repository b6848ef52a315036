"""A variational autoencoder with two losses: python examples/loops/reconstruction.py"""

import torch
from torch import nn

import recoup


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 32))
        self.decode = nn.Sequential(nn.Linear(16, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 64))

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decode(code), mean, log_variance


def loss_of(model, x):
    made, mean, log_variance = model(x)
    distance = (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return (made - x).square().mean() + 0.1 * distance


def train(budget=None):
    torch.manual_seed(0)
    model, x, losses = Autoencoder(), torch.randn(256, 64), []
    optimizer = torch.optim.AdamW(model.parameters())
    fit = recoup.fit(model, x, step=loss_of, optimizer=optimizer, budget=budget) if budget else None
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, fit


if __name__ == "__main__":
    print(train("85%")[1])
