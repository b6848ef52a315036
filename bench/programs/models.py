"""Models with something of their own: parametrizations, hooks, Functions, routing, shared weights."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from bench.programs.program import DIM, Mlp, Program, rows, square, stack


class Reparametrized(Mlp):
    """Weight norm, spectral norm and an orthogonal map, cached for the forward."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.up)
        parametrizations.spectral_norm(self.down)
        self.turn = parametrizations.orthogonal(nn.Linear(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return super().forward(self.turn(x)) + self.turn(x)


class LowRank(nn.Module):
    """LoRA as a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, DIM)), nn.Parameter(torch.zeros(4 * DIM, 2))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a


def lora() -> nn.Module:
    model = stack(Mlp)().requires_grad_(False)
    for block in model.children():
        parametrize.register_parametrization(block.up, "weight", LowRank())
    return model


class Step(torch.autograd.Function):
    """A learned quantiser: rounded forwards, straight through backwards, with a gradient for its step."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, step)
        ctx.levels = 7
        return (x / step).round().clamp(-ctx.levels, ctx.levels) * step

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, step = ctx.saved_tensors
        inside = (x / step).abs() <= ctx.levels
        return grad * inside, (grad * ((x / step).round() - x / step) * inside).sum()


class Quantised(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = Step.apply(self.up.weight, self.step)
        return x + self.down(torch.tanh(functional.linear(Step.apply(x, self.step), weight)))


class InPlaceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        x.tanh_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


class Dirty(Mlp):
    """A Function that works in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(InPlaceFunction.apply(self.up(x) * 1))


REVERSAL = {"strength": 0.5}


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return -REVERSAL["strength"] * grad


class Domains(nn.Module):
    """Gradient reversal whose strength a global holds."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.task, self.domain = stack(Mlp)(), nn.Linear(DIM, 3), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        return torch.cat([self.task(h), self.domain(Reverse.apply(h))], -1)


class Adjoint(torch.autograd.Function):
    """An ODE whose backward integrates again, and asks for gradients of the weights there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, field: Any, *weights: torch.Tensor) -> torch.Tensor:
        ctx.field = field
        with torch.no_grad():
            for _ in range(4):
                x = x + 0.25 * field(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        weights = list(ctx.field.parameters())
        total = [torch.zeros_like(w) for w in weights]
        for _ in range(4):
            with torch.enable_grad():
                at = x.detach().requires_grad_()
                slope = ctx.field(at)
            found = torch.autograd.grad(slope, [at, *weights], 0.25 * grad)
            x, grad = x - 0.25 * slope.detach(), grad + found[0]
            total = [t + g for t, g in zip(total, found[1:], strict=True)]
        return (grad, None, *total)


class Ode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Adjoint.apply(x, self.field, *self.field.parameters())


class Routed(nn.Module):
    """A mixture of experts; each layer appends its balance loss to a list that the loss empties."""

    balance: list[torch.Tensor] = []

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, 4), nn.ModuleList([Mlp() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        gain, chosen = shares.topk(2, -1)
        Routed.balance.append(shares.mean(0).square().sum())
        out = x.clone()
        for number, expert in enumerate(self.experts):
            at, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, at, expert(x[at]) * gain[at, place, None])
        return out


def with_balance(out: torch.Tensor, batch: Any) -> torch.Tensor:
    total = square(out, batch) + 0.1 * sum(Routed.balance)
    Routed.balance.clear()
    return total


class Halting(Mlp):
    """Adaptive computation: it runs until a learned probability says enough."""

    def __init__(self) -> None:
        super().__init__()
        self.halt = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = x.new_ones(len(x), 1)
        for _ in range(4):
            x = super().forward(x) * left + x * (1 - left)
            left = left * torch.sigmoid(-self.halt(x))
            if left.mean().item() < 0.3:
                break
        return x


class Tied(nn.Module):
    """Embeddings that are the head, with deep supervision of every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(30, DIM), nn.ModuleList([Mlp() for _ in range(3)])
        self.head = nn.Linear(DIM, 30, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> Any:
        h, found = self.table(ids), []
        for block in self.blocks:
            h = block(h)
            found.append(self.head(h))
        return Outputs(found, {"last": h})


@dataclasses.dataclass
class Outputs:
    logits: list[torch.Tensor]
    more: dict[str, torch.Tensor]


def supervised(out: Outputs, batch: Any) -> torch.Tensor:
    target = batch[0].flatten()
    losses = [functional.cross_entropy(logits.flatten(0, 1), target) for logits in out.logits]
    return torch.stack(losses).mean() + out.more["last"].square().mean()


class Retaining(Mlp):
    """Keeps its hidden tensor with its gradient, and clamps that in a hook."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = torch.tanh(self.up(x))
        if self.hidden.requires_grad:
            self.hidden.retain_grad()
            self.hidden.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return x + self.down(self.hidden)


def hidden_gradients(model: Any) -> list[Any]:
    return [block.hidden.grad.clone() for block in model]


def backward_hooked() -> nn.Module:
    """Full backward hooks that change gradients, forward pre-hooks that change arguments."""
    model = stack(Mlp)()
    for block in model.children():
        block.register_full_backward_hook(
            lambda module, grads_in, grads_out: tuple(g if g is None else g * 0.9 for g in grads_in)
        )
        block.up.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
    return model


def noised() -> nn.Module:
    """A pre-hook that adds noise to weights in place, a hook that takes it away."""
    model = stack(Mlp)()

    def add(module: Any, args: Any) -> None:
        module.noise = 0.01 * torch.randn_like(module.weight)
        module.weight.data += module.noise

    def take(module: Any, args: Any, out: Any) -> None:
        module.weight.data -= module.noise

    for block in model.children():
        block.up.register_forward_pre_hook(add)
        block.up.register_forward_hook(take)
    return model


class Ghost(Mlp):
    """Ghost batch norm: one norm, called on parts of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([self.norm(part) for part in x.chunk(3)]))


class Ensemble(nn.Module):
    """Members stacked by `torch.func`, run by `vmap` on stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        members = [Mlp() for _ in range(3)]
        weights, _ = torch.func.stack_module_state(members)
        self.weights = nn.ParameterDict({k.replace(".", "_"): nn.Parameter(v.detach()) for k, v in weights.items()})
        self.base = [Mlp().to("meta")]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        named = {k: self.weights[k.replace(".", "_")] for k, _ in self.base[0].named_parameters()}

        def one(weights: Any) -> torch.Tensor:
            return torch.func.functional_call(self.base[0], weights, (x,))

        return torch.func.vmap(one)(named)


class Tagged(torch.Tensor):
    """A tensor subclass that counts the functions it meets."""

    met = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.met += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class ComplexNet(nn.Module):
    """Complex weights throughout, a real loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM, dtype=torch.cfloat) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.complex(x, -x)
        for layer in self.layers:
            h = layer(h)
            h = h * torch.sigmoid(h.abs())
        return torch.view_as_real(h)


def ids() -> tuple[torch.Tensor]:
    return (torch.randint(0, 30, (8, 16), generator=torch.Generator().manual_seed(2)),)


_model = functools.partial(Program, kind="models")
PROGRAMS = [
    _model(name="weight, spectral and orthogonal norms, cached", make=stack(Reparametrized)),
    _model(name="LoRA as a parametrization", make=lora),
    _model(name="a learned quantiser", make=stack(Quantised)),
    _model(name="a Function that works in place", make=stack(Dirty)),
    _model(name="gradient reversal by a global", make=Domains),
    _model(name="an ODE with an adjoint", make=stack(Ode)),
    _model(name="a mixture whose balance losses a list collects", make=stack(Routed, times=2), loss=with_balance),
    _model(name="adaptive computation", make=stack(Halting)),
    _model(name="tied weights, deep supervision, a dataclass", make=Tied, batch=ids, loss=supervised),
    _model(name="hidden gradients kept and clamped by hooks", make=stack(Retaining), left=hidden_gradients),
    _model(
        name="backward hooks and pre-hooks that change values",
        make=backward_hooked,
        batch=lambda: (rows().requires_grad_(),),
    ),
    _model(name="noise on weights between hooks", make=noised),
    _model(name="ghost batch norm", make=stack(Ghost)),
    _model(name="an ensemble by vmap on stacked weights", make=Ensemble),
    _model(name="a tensor subclass as the batch", make=stack(Mlp), batch=lambda: (rows().as_subclass(Tagged),)),
    _model(name="complex weights", make=ComplexNet),
]
