"""A classifier and a DataLoader: python examples/loops/classification.py"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import recoup


def train(budget=None):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)], nn.Linear(64, 10))
    loader = DataLoader(TensorDataset(torch.randn(640, 64), torch.randint(0, 10, (640,))), batch_size=128)
    criterion, losses, fit = nn.CrossEntropyLoss(), [], None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget:
        x, y = next(iter(loader))
        fit = recoup.fit(model, inputs=x, targets=y, loss=criterion, optimizer=optimizer, budget=budget)
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, fit


if __name__ == "__main__":
    print(train("85%")[1])
