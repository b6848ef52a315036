"""A policy and its value, actions drawn in the forward: python examples/loops/policy_gradient.py"""

import torch
from torch import nn

import recoup


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64)) for _ in range(5)])
        self.policy, self.value = nn.Linear(64, 6), nn.Linear(64, 1)

    def forward(self, states):
        hidden = self.body(states)
        return self.policy(hidden), self.value(hidden)[:, 0]


def loss_of(model, batch):
    states, rewards = batch
    logits, values = model(states)
    actions = torch.distributions.Categorical(logits=logits)
    chosen = actions.sample()
    gain = rewards.gather(1, chosen[:, None])[:, 0] - values
    return -(actions.log_prob(chosen) * gain.detach()).mean() + gain.square().mean() - 0.01 * actions.entropy().mean()


def train(budget=None):
    torch.manual_seed(0)
    model, batch, losses = Policy(), (torch.randn(256, 64), torch.randn(256, 6)), []
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    fit = recoup.fit(model, batch, step=loss_of, optimizer=optimizer, budget=budget) if budget else None
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, fit


if __name__ == "__main__":
    print(train("85%")[1])
