"""Training loops with something of their own: adversaries, teachers, copies, several backwards, penalties, banks."""

from __future__ import annotations

import collections
import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bench.programs.program import DIM, Mlp, Program, Training, rows, sgd, square, stack

HELD: dict[str, Any] = {}


def held_state(model: nn.Module) -> list[Any]:
    """Returns what the loop holds beside the model."""
    made = []
    for value in HELD.values():
        if isinstance(value, nn.Module):
            made += [t.detach().clone() for t in (*value.parameters(), *value.buffers())]
        elif not isinstance(value, torch.optim.Optimizer):
            made.append(list(value) if isinstance(value, collections.deque) else value)
    return made


def holding(make: Any = None, **others: Any) -> Any:
    """Returns what makes the model, and anew what the loop holds."""

    def build() -> nn.Module:
        HELD.clear()
        model = (make or stack(Mlp))()
        for name, maker in others.items():
            HELD[name] = maker(model)
        return model

    return build


def averaged(training: Training) -> torch.Tensor:
    """An exponential moving average of the weights, evaluated in every step."""
    loss = _step(training, training.loss)
    HELD["ema"].update_parameters(training.model)
    with torch.no_grad():
        return loss + square(HELD["ema"](*training.batch), None)


def adversarial(training: Training) -> torch.Tensor:
    """A discriminator of its own optimizer, trained on what the generator made, then the generator through it."""
    (x,), judge = training.batch, HELD["judge"]
    made = training.model(x)
    HELD["optimizer"].zero_grad()
    of_judge = functional.softplus(judge(made.detach())).mean() + functional.softplus(-judge(x)).mean()
    of_judge.backward()
    HELD["optimizer"].step()
    return _step(training, lambda: functional.softplus(-judge(made)).mean()) + of_judge.detach()


def penalised(training: Training) -> torch.Tensor:
    """A gradient penalty: backward through backward."""

    def loss() -> torch.Tensor:
        x = training.batch[0].clone().requires_grad_()
        out = training.model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return square(out, None) + (slope.norm(dim=-1) - 1).square().mean()

    return _step(training, loss)


def reinforced(training: Training) -> torch.Tensor:
    """REINFORCE: sampled actions, their rewards, a running baseline."""

    def loss() -> torch.Tensor:
        policy = torch.distributions.Categorical(logits=training.model(*training.batch))
        action = policy.sample()
        reward = (action % 3).float()
        HELD["baseline"] = 0.9 * HELD["baseline"] + 0.1 * float(reward.mean())
        return -(policy.log_prob(action) * (reward - HELD["baseline"])).mean() - 0.01 * policy.entropy().mean()

    return _step(training, loss)


def proximal(training: Training) -> torch.Tensor:
    """PPO: the policy of before, a deep copy of the planned model, and two steps against it."""
    old = copy.deepcopy(training.model)
    action = torch.arange(len(training.batch[0])) % DIM
    with torch.no_grad():
        before = old(*training.batch).log_softmax(-1)[torch.arange(len(action)), action]

    def loss() -> torch.Tensor:
        now = training.model(*training.batch).log_softmax(-1)[torch.arange(len(action)), action]
        ratio = (now - before).exp()
        return -torch.minimum(ratio, ratio.clamp(0.9, 1.1)).mean()

    return _step(training, loss) + _step(training, loss)


def reptile(training: Training) -> torch.Tensor:
    """Meta-learning by copies: an inner loop on a copy, and a step towards it."""
    inner = copy.deepcopy(training.model)
    optimizer = sgd(inner)
    for shift in range(2):
        optimizer.zero_grad()
        loss = square(inner(training.batch[0] + shift), None)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for p, q in zip(training.model.parameters(), inner.parameters(), strict=True):
            p.lerp_(q, 0.5)
    return loss.detach()


def distilled(training: Training) -> torch.Tensor:
    """A teacher in evaluation mode, softened targets."""
    with torch.no_grad():
        target = HELD["teacher"](*training.batch).softmax(-1)
    return _step(
        training,
        lambda: functional.kl_div(training.model(*training.batch).log_softmax(-1), target, reduction="batchmean"),
    )


def accumulated(training: Training) -> torch.Tensor:
    """Two micro-batches of other sizes, clipped by norm."""
    (x,) = training.batch
    training.optimizer.zero_grad()
    losses = []
    for part in (x[:32], x[32:]):
        loss = square(training.model(part), None) * len(part) / len(x)
        loss.backward()
        losses.append(loss.detach())
    norm = nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
    training.optimizer.step()
    return torch.stack([*losses, norm])


def two_backwards(training: Training) -> torch.Tensor:
    """Two losses over one trunk, each with a backward of its own."""
    training.optimizer.zero_grad()
    out = training.model(*training.batch)
    first, second = out.square().mean(), (out - 1).abs().mean()
    first.backward(retain_graph=True)
    second.backward()
    training.optimizer.step()
    return torch.stack([first.detach(), second.detach()])


def balanced(training: Training) -> torch.Tensor:
    """GradNorm: losses weighted by the gradients that they give the last layer."""

    def loss() -> torch.Tensor:
        out = training.model(*training.batch)
        losses = [out.square().mean(), out.abs().mean()]
        weight = training.model[-1].down.weight
        norms = [torch.autograd.grad(each, weight, retain_graph=True)[0].norm() for each in losses]
        return sum(each / norm for each, norm in zip(losses, norms, strict=True))

    return _step(training, loss)


def contrastive(training: Training) -> torch.Tensor:
    """Two views against each other and against a bank of past embeddings."""

    def loss() -> torch.Tensor:
        (x,) = training.batch
        a, b = (functional.normalize(training.model(x + 0.1 * torch.randn_like(x)), dim=-1) for _ in range(2))
        bank = torch.cat([b, *HELD["bank"]])
        HELD["bank"].append(b.detach()[:16])
        return functional.cross_entropy(10 * a @ bank.T, torch.arange(len(a)))

    return _step(training, loss)


def truncated(training: Training) -> torch.Tensor:
    """Truncated backpropagation through time: a state that is carried over and detached."""
    training.optimizer.zero_grad()
    state, losses = HELD["state"], []
    for part in training.batch[0].chunk(3):
        state = training.model(part + state)
        loss = square(state, None)
        loss.backward()
        losses.append(loss.detach())
        state = state.detach()
    HELD["state"] = state
    training.optimizer.step()
    return torch.stack(losses)


def evaluated(training: Training) -> torch.Tensor:
    """Evaluation between steps, in inference mode, and a checkpoint that is written and read."""
    loss = _step(training, training.loss)
    training.model.eval()
    with torch.inference_mode():
        value = square(training.model(*training.batch), None).item()
    training.model.train()
    training.model.load_state_dict(copy.deepcopy(training.model.state_dict()))
    return loss + value


def layerwise(training: Training) -> torch.Tensor:
    """Each block learns by itself, on the detached output of the one before."""
    training.optimizer.zero_grad()
    (h,), losses = training.batch, []
    for block in training.model:
        h = block(h.detach())
        loss = square(h, None)
        loss.backward()
        losses.append(loss.detach())
    training.optimizer.step()
    return torch.stack(losses)


def functional_gradients(training: Training) -> torch.Tensor:
    """Gradients for each sample by `vmap(grad)`, clipped one by one (differential privacy)."""
    model, (x,) = training.model, training.batch
    weights = {k: p.detach() for k, p in model.named_parameters()}

    def of_one(weights: Any, row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (row[None],)).square().mean()

    each = torch.func.vmap(torch.func.grad(of_one), (None, 0))(weights, x[:8])
    for name, p in model.named_parameters():
        g = each[name].flatten(1)
        p.grad = (g / g.norm(dim=1, keepdim=True).clamp(min=0.01)).mean(0).view_as(p)
    training.optimizer.step()
    return square(model(x), None).detach()


def pruned_while_training(training: Training) -> torch.Tensor:
    """Magnitude pruning in every step, by masks in hooks."""
    from torch.nn.utils import prune

    loss = _step(training, training.loss)
    for block in training.model:
        prune.l1_unstructured(block.up, "weight", amount=0.1)
    return loss


def scheduled(training: Training) -> torch.Tensor:
    """Blocks added while it trains, with an optimizer made again."""
    loss = _step(training, training.loss)
    training.model.append(copy.deepcopy(training.model[0]))
    training.optimizer = sgd(training.model)
    return loss


def manual(training: Training) -> torch.Tensor:
    """No optimizer: `torch.autograd.grad` and weights written under no_grad."""
    weights = list(training.model.parameters())
    loss = training.loss()
    for p, g in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        with torch.no_grad():
            p -= 0.05 * g
    return loss.detach()


def perturbing(training: Training) -> torch.Tensor:
    """Adversarial examples: two ascents on the input before the step."""
    x = training.batch[0].clone()
    for _ in range(2):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(square(training.model(x), None), x)
        x = (x + 0.01 * slope.sign()).detach()
    return _step(training, lambda: square(training.model(x), None))


def _step(training: Training, loss_of: Any) -> torch.Tensor:
    training.optimizer.zero_grad()
    loss = loss_of()
    loss.backward()
    training.optimizer.step()
    return loss.detach()


def _judge(model: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, 1))


_loop = functools.partial(Program, kind="loops", make=stack(Mlp))
PROGRAMS = [
    _loop(
        name="an average of weights (EMA), evaluated each step",
        step=averaged,
        make=holding(ema=lambda m: torch.optim.swa_utils.AveragedModel(m)),
        left=held_state,
    ),
    _loop(
        name="a GAN of two optimizers",
        step=adversarial,
        make=holding(judge=_judge, optimizer=lambda m: torch.optim.Adam(HELD["judge"].parameters())),
        left=held_state,
    ),
    _loop(name="a gradient penalty", step=penalised),
    _loop(
        name="REINFORCE with a running baseline", step=reinforced, make=holding(baseline=lambda m: 0.0), left=held_state
    ),
    _loop(name="PPO against a deep copy", step=proximal),
    _loop(name="Reptile, an inner loop on a copy", step=reptile),
    _loop(
        name="distillation", step=distilled, make=holding(teacher=lambda m: copy.deepcopy(m).eval()), left=held_state
    ),
    _loop(name="micro-batches of other sizes, clipped", step=accumulated),
    _loop(name="two backwards over one trunk", step=two_backwards),
    _loop(name="losses balanced by their gradients (GradNorm)", step=balanced),
    _loop(
        name="contrastive with a bank",
        step=contrastive,
        make=holding(bank=lambda m: collections.deque(maxlen=2)),
        left=held_state,
    ),
    _loop(
        name="truncated backpropagation through time",
        step=truncated,
        make=holding(state=lambda m: torch.zeros(32, DIM)),
        left=held_state,
    ),
    _loop(name="evaluation and state dicts between steps", step=evaluated),
    _loop(name="each block learns by itself", step=layerwise),
    _loop(name="gradients of each sample, clipped", step=functional_gradients),
    _loop(name="pruning while it trains", step=pruned_while_training),
    _loop(name="blocks added while it trains", step=scheduled),
    _loop(name="weights written by hand", step=manual),
    _loop(name="adversarial examples", step=perturbing, batch=lambda: (rows(48),)),
]
