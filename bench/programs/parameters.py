"""Weights that are not the module's own or not as they were: called functionally, frozen, in the loss."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bench.programs.program import DIM, Mlp, Program, Training, sgd, square, stack

# -- functional_call


def maml(training: Training) -> torch.Tensor:
    """First-order MAML, one inner step."""
    model, (x,) = training.model, training.batch
    training.optimizer.zero_grad()
    weights = dict(model.named_parameters())
    inner = torch.func.functional_call(model, weights, (x,)).square().mean()
    slopes = torch.autograd.grad(inner, list(weights.values()))
    fast = {k: p - 1e-2 * g for (k, p), g in zip(weights.items(), slopes, strict=True)}
    loss = (torch.func.functional_call(model, fast, (x.flip(0),)) - 1).square().mean()
    loss.backward()
    training.optimizer.step()
    return loss.detach()


def second_order_maml(training: Training) -> torch.Tensor:
    """The gradient goes through the inner step."""
    model, (x,) = training.model, training.batch
    training.optimizer.zero_grad()
    weights = dict(model.named_parameters())
    inner = torch.func.functional_call(model, weights, (x,)).square().mean()
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    fast = {k: p - 1e-2 * g for (k, p), g in zip(weights.items(), slopes, strict=True)}
    loss = (torch.func.functional_call(model, fast, (x.flip(0),)) - 1).square().mean()
    loss.backward()
    training.optimizer.step()
    return loss.detach()


def perturbed(training: Training) -> torch.Tensor:
    """Weights with noise, drawn each step, by a parametrization that is there for the forward only."""
    model, (x,) = training.model, training.batch
    training.optimizer.zero_grad()
    noisy = {k: p * (1 + 1e-3 * torch.randn_like(p)) for k, p in model.named_parameters()}
    with torch.nn.utils.stateless._reparametrize_module(model, noisy):
        out = model(x)
    loss = square(out, None)
    loss.backward()
    training.optimizer.step()
    return loss.detach()


# -- thawed


def frozen_for_forward(training: Training) -> torch.Tensor:
    """The generator's step of a GAN: the discriminator is frozen for the forward and thawed before backward."""
    model, (x,) = training.model, training.batch
    training.optimizer.zero_grad()
    x = x.clone().requires_grad_()
    model.requires_grad_(False)
    loss = (model(x) - 1).square().mean()
    model.requires_grad_(True)
    loss.backward()
    return torch.cat([loss.detach()[None], x.grad.flatten()])


def chains() -> nn.Module:
    return nn.Sequential(
        *[nn.Sequential(*[nn.Linear(DIM, DIM, bias=False) for _ in range(3)], nn.Tanh()) for _ in range(4)]
    )


def half_frozen(training: Training) -> torch.Tensor:
    """Gradual thawing: other blocks are frozen in every step, changed back before backward."""
    model, (x,) = training.model, training.batch
    training.optimizer.zero_grad()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    out = model(x)
    for parameter in model[0].parameters():
        parameter.requires_grad_(True)
    loss = square(out, None)
    loss.backward()
    training.optimizer.step()
    return loss.detach()


def thawed_in_a_hook(training: Training) -> torch.Tensor:
    """A gradient hook thaws what the forward ran frozen, in the middle of backward."""
    model, (x,) = training.model, training.batch
    training.optimizer.zero_grad()
    model[1].requires_grad_(False)
    out = model(x)
    out.register_hook(lambda grad: model[1].requires_grad_(True) and None)
    loss = square(out, None)
    loss.backward()
    model[1].requires_grad_(True)
    training.optimizer.step()
    return loss.detach()


# -- loss_params

REST: dict[str, Any] = {}


def with_rest(make: Any) -> Any:
    """Returns what makes the model, and what the loss holds beside it."""

    def build() -> nn.Module:
        model = stack(Mlp)()
        REST["of loss"] = make()
        return model

    return build


def of_rest(model: nn.Module) -> list[Any]:
    rest = REST["of loss"]
    held = [rest] if isinstance(rest, torch.Tensor) else [*rest.parameters(), *rest.buffers()]
    return [[t.detach().clone() for t in held], [None if t.grad is None else t.grad.clone() for t in held]]


def through(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return functional.softplus(-REST["of loss"](out)).mean()


def weighted(out: torch.Tensor, batch: Any) -> torch.Tensor:
    weight = REST["of loss"]
    return out.square().mean() * (-weight).exp() + weight


class Margin(nn.Module):
    """ArcFace: weights on a sphere, a margin for the right class, a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(5, DIM))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        cosine = functional.linear(functional.normalize(x), functional.normalize(self.centers)).clamp(-0.99, 0.99)
        target = torch.arange(len(x)) % 5
        turned = torch.cos(cosine.acos() + 0.2 * functional.one_hot(target, 5))
        return functional.cross_entropy(8 * turned, target) * torch.ones(len(x))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, 1))


# -- optimizers


class Sam(torch.optim.SGD):
    """Sharpness-aware: it climbs, asks for the gradient there, and steps from where it was."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "SAM requires a closure"
        with torch.enable_grad():
            loss = closure()
        held = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in held]
        with torch.no_grad():
            for p in held:
                p.add_(p.grad, alpha=0.05)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, value in zip(held, before, strict=True):
                p.copy_(value)
        super().step()
        return loss


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow another optimizer's every other step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.calls = inner, 0
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        for p in self.param_groups[0]["params"]:
            self.state[p]["slow"] = p.detach().clone()

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.calls += 1
        if self.calls % 2 == 0:
            for p in self.param_groups[0]["params"]:
                slow = self.state[p]["slow"]
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)
        return loss


def closing(training: Training) -> torch.Tensor:
    """A step whose optimizer calls for the loss."""

    def closure() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = training.loss()
        loss.backward()
        return loss

    return torch.as_tensor(training.optimizer.step(closure)).detach()


def optimizers() -> list[Program]:
    import transformers

    made: dict[str, tuple[Any, Any]] = {
        "Adafactor": (lambda m: torch.optim.Adafactor(m.parameters()), None),
        "ASGD": (lambda m: torch.optim.ASGD(m.parameters()), None),
        "LBFGS": (lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3), closing),
        "SAM with closure": (lambda m: Sam(m.parameters(), lr=0.1), closing),
        "transformers' Adafactor": (lambda m: transformers.Adafactor(m.parameters()), None),
        "Lookahead around Adam": (lambda m: Lookahead(torch.optim.Adam(m.parameters())), None),
        "Muon for matrices": (
            lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=0.01),
            None,
        ),
    }
    return [
        Program(
            kind="optimizers",
            name=name,
            make=stack(Mlp),
            optimizer=make,
            step=step,
            options=lambda training: {"optimizer": training.optimizer},
        )
        for name, (make, step) in made.items()
    ]


# -- max_norm_twice


class Towers(nn.Module):
    """One table, looked up twice and renormalised each time."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, DIM, max_norm=1.0)
        self.a, self.b = Mlp(), Mlp()

    def forward(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return self.a(torch.tanh(self.table(i))) * self.b(torch.tanh(self.table(j)))


class Bags(Towers):
    """The same by `EmbeddingBag`."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = nn.EmbeddingBag(50, DIM, max_norm=1.0)


class Renormalised(Towers):
    """Weights renormalised by hand before each use."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, DIM)

    def forward(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        out = []
        for tower, index in ((self.a, i), (self.b, j)):
            with torch.no_grad():
                self.table.weight[index[:, 0]] = functional.normalize(self.table.weight[index[:, 0]], dim=-1)
            out.append(tower(torch.tanh(functional.embedding(index, self.table.weight))))
        return out[0] * out[1]


def indices() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randint(0, 50, (16, 6), generator=generator) for _ in range(2))


# -- remove


def replaced(training: Training, fitted: Any) -> None:
    training.model[1] = copy.deepcopy(training.model[1])
    _removed(training, fitted)


def deleted(training: Training, fitted: Any) -> None:
    del training.model[1]
    _removed(training, fitted)


def given_a_parametrization(training: Training, fitted: Any) -> None:
    """Changes the class of a planned block's child."""
    nn.utils.parametrizations.weight_norm(training.model[1].up)
    training.optimizer = sgd(training.model)
    _removed(training, fitted)


def _removed(training: Training, fitted: Any) -> None:
    if fitted is not None:
        fitted.applied.remove()
    left = [name for name, module in training.model.named_modules() if "forward" in vars(module)]
    assert not left, f"still patched: {left}"


_program = functools.partial(Program, make=stack(Mlp))
PROGRAMS = [
    _program(kind="functional_call", name="first-order MAML", step=maml),
    _program(kind="functional_call", name="MAML, gradients through the inner step", step=second_order_maml),
    _program(kind="functional_call", name="noise on the weights by a parametrization", step=perturbed),
    _program(kind="thawed", name="frozen for the forward, chains of linears", make=chains, step=frozen_for_forward),
    _program(kind="thawed", name="frozen for the forward, MLPs", step=frozen_for_forward),
    _program(kind="thawed", name="one block frozen for the forward", step=half_frozen),
    _program(kind="thawed", name="thawed by a gradient hook in backward", step=thawed_in_a_hook),
    _program(
        kind="loss_params",
        name="through a discriminator",
        make=with_rest(lambda: nn.Sequential(Mlp(), nn.Linear(DIM, 1))),
        loss=through,
        left=of_rest,
    ),
    _program(
        kind="loss_params",
        name="a learned weight of the loss",
        make=with_rest(lambda: nn.Parameter(torch.zeros(()))),
        loss=weighted,
        left=of_rest,
    ),
    _program(kind="loss_params", name="ArcFace with a buffer", make=with_rest(Margin), loss=through, left=of_rest),
    _program(
        kind="loss_params", name="a head with BatchNorm", make=with_rest(with_batch_norm), loss=through, left=of_rest
    ),
    *optimizers(),
    _program(kind="remove", name="a planned block is replaced, the plan is removed", between=replaced),
    _program(kind="remove", name="a planned block is deleted, the plan is removed", between=deleted),
    _program(
        kind="remove", name="a planned block gets weight norm, the plan is removed", between=given_a_parametrization
    ),
    _program(kind="max_norm_twice", name="two towers over one `Embedding(max_norm)`", make=Towers, batch=indices),
    _program(kind="max_norm_twice", name="the same by `EmbeddingBag`", make=Bags, batch=indices),
    _program(kind="max_norm_twice", name="rows renormalised by hand between uses", make=Renormalised, batch=indices),
]
