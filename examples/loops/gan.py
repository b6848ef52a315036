"""A generator and a discriminator, an optimizer each: python examples/loops/gan.py"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import recoup


def net(*sizes):
    return nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.LeakyReLU(0.2)) for a, b in pairwise(sizes)])


def train(budget=None):
    torch.manual_seed(0)
    generator, critic = net(16, 128, 128, 128, 32), net(32, 128, 128, 128, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4)
    real, ones, losses, fit = torch.randn(256, 32), torch.ones(256, 1), [], None

    def generator_loss(model, noise):
        return bce(critic(model(noise)), ones)

    def critic_loss(model, batch):
        return bce(model(batch[0]), ones) + bce(model(batch[1]), ones - 1)

    if budget:
        noise = torch.randn(256, 16)
        fit = recoup.fit(generator, noise, step=generator_loss, optimizer=of_generator, budget=budget)
        fake = generator(noise).detach()
        recoup.fit(critic, (real, fake), step=critic_loss, optimizer=of_critic, budget=budget)
    torch.manual_seed(1)
    for _ in range(20):
        noise = torch.randn(256, 16)
        for step, model, batch, optimizer in (
            (critic_loss, critic, (real, generator(noise).detach()), of_critic),
            (generator_loss, generator, noise, of_generator),
        ):
            of_generator.zero_grad()
            of_critic.zero_grad()  # the generator's loss has left gradients there
            loss = step(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, fit


if __name__ == "__main__":
    print(train("85%")[1])
