"""Two towers, all pairs of a batch in the loss: python examples/loops/contrastive.py"""

import torch
from torch import nn

import recoup


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.images = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 32))
        self.texts = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images, texts):
        a, b = self.images(images), self.texts(texts).mean(1)
        return self.scale.exp() * nn.functional.normalize(a) @ nn.functional.normalize(b).T


def train(budget=None):
    torch.manual_seed(0)
    model, losses, fit = Towers(), [], None
    batch = (torch.randn(64, 64), torch.randint(0, 64, (64, 16)))
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_of(logits, _):
        pairs = torch.arange(len(logits))
        return nn.functional.cross_entropy(logits, pairs) + nn.functional.cross_entropy(logits.T, pairs)

    if budget:
        fit = recoup.fit(model, batch, loss=loss_of, optimizer=optimizer, budget=budget)
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model(*batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, fit


if __name__ == "__main__":
    print(train("85%")[1])
