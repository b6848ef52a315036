"""A small encoder and decoder with BatchNorm, labels for every pixel: python examples/loops/segmentation.py"""

import torch
from torch import nn

import recoup


def block(before, after):
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = block(3, 16), block(16, 32), block(48, 16)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        first = self.a(x)
        low = nn.functional.interpolate(self.b(nn.functional.max_pool2d(first, 2)), scale_factor=2)
        return self.head(self.c(torch.cat([first, low], 1)))


def train(budget=None):
    torch.manual_seed(0)
    model, criterion, losses, fit = Net(), nn.CrossEntropyLoss(), [], None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(4, 3, 32, 32), torch.randint(0, 4, (4, 32, 32))
    if budget:
        fit = recoup.fit(model, inputs=x, targets=y, loss=criterion, optimizer=optimizer, budget=budget)
    for _ in range(20):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, fit


if __name__ == "__main__":
    print(train("85%")[1])
