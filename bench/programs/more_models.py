"""Forwards that swap weights, freeze them, ask for gradients, keep things on the host, or are not methods."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bench.programs.program import DIM, Mlp, Program, many, square, stack


class Swapped(Mlp):
    """Runs on a weight made on the way, put where its parameter was."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(4 * DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.up.weight
        del self.up.weight
        self.up.weight = weight + self.more
        try:
            return super().forward(x)
        finally:
            del self.up.weight
            self.up.weight = weight


class InferenceInside(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            scale = super().forward(x).mean()
        return super().forward(x) + scale.item()


class SavedOnHost(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


class Forces(Mlp):
    """Needs a gradient in its forward, of a graph of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(inner).square().sum(), inner, create_graph=True)
        return super().forward(x) - 0.1 * slope


class FrozenInside(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        frozen = super().forward(x)
        for parameter in self.parameters():
            parameter.requires_grad_(True)
        return frozen + super().forward(x.detach())


class Bound(Mlp):
    """Its forward is a bound method in an instance attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.other

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * Mlp.forward(self, x)


class HandMasked(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        mask = torch.rand_like(x) > 0.5
        return torch.where(mask, made, made.new_zeros(())) * 0 + made.masked_fill(mask, 0.0) / 0.5


class Namespaces(Mlp):
    """Hands an object on and changes it."""

    def forward(self, x: Any) -> Any:
        held = x if isinstance(x, SimpleNamespace) else SimpleNamespace(x=x, calls=0)
        held.x, held.calls = super().forward(held.x), held.calls + 1
        return held


def of_namespace(output: Any, batch: Any) -> torch.Tensor:
    return square(output.x * output.calls, batch)


# -- fit_gives_up


class Energy(nn.Module):
    """Forces: its forward asks for a gradient of its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 1))

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        at = at if at.requires_grad else at.requires_grad_()
        return torch.autograd.grad(self.net(at).sum(), at, create_graph=True)[0]


class Bayes(nn.Module):
    """Weights drawn around their means."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spread = Mlp(), nn.Parameter(torch.tensor(-5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = functional.softplus(self.spread)
        drawn = {k: v + width * torch.randn_like(v) for k, v in self.net.named_parameters()}
        return torch.func.functional_call(self.net, drawn, (x,))


class Clamped(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


class Streams(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.streams = {"a": torch.Generator().manual_seed(1)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.rand(x.shape, generator=self.streams["a"]))


class Lipschitz(Mlp):
    """Weights divided in place by their norm, when it is over one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for linear in (self.up, self.down):
                linear.weight.div_(linear.weight.norm().clamp(min=1.0))
        return super().forward(x)


class Equilibrium(Mlp):
    """A fixed point found without gradients, one step with them, and a hook that solves for the gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(5):
                z = torch.tanh(Mlp.forward(self, z) * 0.1 + x)
        z = torch.tanh(Mlp.forward(self, z) * 0.1 + x)
        if z.requires_grad:
            start = z.detach().requires_grad_()
            inner = torch.tanh(Mlp.forward(self, start) * 0.1 + x.detach())

            def solve(grad: torch.Tensor) -> torch.Tensor:
                g = grad
                for _ in range(3):
                    g = torch.autograd.grad(inner, start, g, retain_graph=True)[0] + grad
                return g

            z.register_hook(solve)
        return z


_model = functools.partial(Program, kind="models")
PROGRAMS = [
    _model(name="a weight made on the way", make=stack(Swapped)),
    _model(name="inference mode inside", make=stack(InferenceInside)),
    _model(name="`save_on_cpu` inside", make=stack(SavedOnHost)),
    _model(name="forces of a graph of its own", make=stack(Forces)),
    _model(name="frozen inside of a forward", make=stack(FrozenInside)),
    _model(name="a forward that is an attribute", make=stack(Bound)),
    _model(name="masks by hand", make=stack(HandMasked)),
    _model(name="a namespace that layers change", make=stack(Namespaces), loss=of_namespace),
    *many(
        "fit_gives_up",
        {
            "energy, then forces, in a submodule": stack(Energy),
            "weights drawn in forward (Bayes by backprop)": stack(Bayes),
            "weights clamped in forward": stack(Clamped),
            "a generator in a dict": stack(Streams),
            "weights divided by their norm in forward": stack(Lipschitz),
            "a fixed point whose gradient a hook solves for": stack(Equilibrium),
        },
    ),
]
