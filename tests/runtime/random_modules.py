"""Random small models: layers, norms, dropout, reuse, skips, in-place ops, frozen parameters; and random plans."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from recoup.ir.decision import Decision, Recompute, Rederive, Save

WIDTH = 8


class Skip(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Gate(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left = left
        self.right = right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.left(x)) * self.right(x)


class Twice(nn.Module):
    """The same module run again: its weights are shared by two calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Joined(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.mix = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(torch.cat([x, self.inner(x)], -1))


class Drifting(nn.Module):
    """Keeps a running mean in a buffer, changed in place, and a counter; draws from python's stream."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return (x - self.mean) * (1 + random.random() / self.calls)


class Nested(nn.Module):
    """Takes and returns a dict."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unwrap({"x": [self.inner(x)], "scale": 0.5})

    def unwrap(self, nest: dict[str, Any]) -> torch.Tensor:
        return nest["x"][0] * nest["scale"]


_LEAVES = [
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.LayerNorm(WIDTH),
    lambda: nn.RMSNorm(WIDTH),
    lambda: nn.BatchNorm1d(WIDTH),
    lambda: nn.GroupNorm(2, WIDTH),
    lambda: nn.Dropout(0.3),
    lambda: nn.AlphaDropout(0.2),
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    lambda: nn.ReLU(inplace=True),
    lambda: nn.Softmax(-1),
    lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH),
    Drifting,
]


class _Squared(nn.Module):
    def __init__(self, bilinear: nn.Module) -> None:
        super().__init__()
        self.bilinear = bilinear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bilinear(x, x)


def _leaf(rng: random.Random) -> nn.Module:
    made = rng.choice(_LEAVES)()
    return _Squared(made) if isinstance(made, nn.Bilinear) else made


def _tree(rng: random.Random, depth: int) -> nn.Module:
    if depth == 0 or rng.random() < 0.3:
        return _leaf(rng)
    kind = rng.randrange(6)
    if kind == 0:
        return Skip(_tree(rng, depth - 1))
    if kind == 1:
        return Gate(_tree(rng, depth - 1), _tree(rng, depth - 1))
    if kind == 2:
        return Twice(_tree(rng, depth - 1))
    if kind == 3:
        return Joined(_tree(rng, depth - 1))
    if kind == 4:
        return Nested(_tree(rng, depth - 1))
    return nn.Sequential(*(_tree(rng, depth - 1) for _ in range(rng.randint(2, 4))))


def random_model(seed: int) -> nn.Module:
    """Returns a model, the same at every call; some are shared, some frozen."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    parts = [nn.Linear(WIDTH, WIDTH), *(_tree(rng, 3) for _ in range(rng.randint(2, 4)))]
    if rng.random() < 0.3:
        parts.append(parts[rng.randrange(len(parts))])
    model = nn.Sequential(*parts, nn.Linear(WIDTH, WIDTH))
    for parameter in model.parameters():
        if rng.random() < 0.15:
            parameter.requires_grad_(False)
    model[-1].requires_grad_(True)
    return model


def random_decisions(seed: int, model: nn.Module) -> list[Decision]:
    """Returns decisions over the model's modules, nested ones and spans among them."""
    rng = random.Random(seed)
    paths = [path for path, _ in model.named_modules()]
    chosen: dict[str, Decision] = {}
    for path in rng.sample(paths, rng.randint(1, min(6, len(paths)))):
        action = rng.choice(["recompute", "recompute", "recompute", "rederive", "save"])
        if action == "recompute":
            chosen[path] = Recompute(path=path, inside=rng.choice(["save", "rederive"]))
        else:
            chosen[path] = (Rederive if action == "rederive" else Save)(path=path)
    if rng.random() < 0.4:  # a span over children of the model that follow each other
        start = rng.randrange(len(model) - 1)
        members = [str(i) for i in range(start, min(len(model), start + rng.randint(2, 3)))]
        own = {name for name, _ in model.named_modules()}
        members = [m for m in members if m in own]
        if len(members) > 1:
            chosen.pop(members[0], None)  # the other members, and what is inside, keep decisions of their own
            inside = rng.choice(["save", "rederive"])
            chosen[members[0]] = Recompute(path=members[0], span=tuple(members[1:]), inside=inside)
    if not chosen:
        chosen["0"] = Recompute(path="0")
    return list(chosen.values())


def run(model: nn.Module, seed: int) -> list[Any]:
    """Runs two steps and returns what they leave: losses, gradients, buffers, counters, the next random numbers."""
    torch.manual_seed(seed)
    random.seed(seed)
    left: list[Any] = []
    for i in range(2):
        x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(seed + i)).requires_grad_()
        loss = model(x * 1.0).square().mean()
        loss.backward()
        left += [loss.detach(), x.grad, *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
    left += [b.clone() for b in model.buffers()]
    left += [m.calls for m in model.modules() if isinstance(m, Drifting)]
    return [*left, torch.rand(2), random.random()]


def same(a: list[Any], b: list[Any]) -> bool:
    """Whether two runs left the same bits, NaNs included."""

    def pair(x: Any, y: Any) -> bool:
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            return torch.equal(x, y) or bool(((x == y) | (x.isnan() & y.isnan())).all())
        return type(x) is type(y) and x == y

    return len(a) == len(b) and all(map(pair, a, b))
