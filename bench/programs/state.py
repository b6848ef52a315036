"""State that a step changes: in plain objects, in caches, in buffers that grow, in weights and batches themselves."""

from __future__ import annotations

import collections
import functools
import itertools
import weakref
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from bench.programs.program import DIM, Mlp, Program, rows, stack

# -- object_state


class Meter:
    """Counts calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.means = np.zeros(2)

    def update(self, x: torch.Tensor) -> None:
        self.calls += 1
        self.means += float(x.detach().mean())


class KeepsEverything(Mlp):
    """The listed containers, all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.meter, self.nested = Meter(), {"a": {"n": 0}}
        self.default: Any = collections.defaultdict(int)
        self.counter: Any = collections.Counter()
        self.held = {"t": torch.zeros(1)}
        self.norms = [nn.BatchNorm1d(DIM, affine=False)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter.update(x)
        self.nested["a"]["n"] += 1
        self.default["n"] += 1
        self.counter.update(n=1)
        self.held["t"].add_(1)
        return super().forward(self.norms[0](x))

    def state(self) -> list[Any]:
        norm = self.norms[0]
        return [
            self.meter.calls,
            self.meter.means.tolist(),
            self.nested["a"]["n"],
            self.default["n"],
            self.counter["n"],
            self.held["t"],
            norm.running_mean,
            norm.num_batches_tracked,
        ]


class History(Mlp):
    """A window of past activations in a deque, and what was seen in a set."""

    def __init__(self) -> None:
        super().__init__()
        self.window: Any = collections.deque(maxlen=2)
        self.seen: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.window.append(x.detach().mean(0))
        self.seen.add(len(self.seen))
        return super().forward(x + sum(self.window) / len(self.window))

    def state(self) -> list[Any]:
        return [list(self.window), len(self.seen)]


class Wrapped(Mlp):
    """Numbers drawn from an iterator, and a closure with a cell of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, calls = itertools.count(), 0

        def anneal() -> float:
            nonlocal calls
            calls += 1
            return 1 / calls

        self.anneal = anneal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.anneal()) * (1 + 0.01 * next(self.numbers))

    def state(self) -> list[Any]:
        return [next(self.numbers), self.anneal()]


def states(model: Any) -> list[Any]:
    """Returns the state of each block that keeps some."""
    return [block.state() for block in model]


LOG: list[float] = []


def hooked() -> nn.Module:
    """A forward hook that writes into a list outside of the model."""
    LOG.clear()
    model = stack(Mlp)()
    for block in model.children():
        block.up.register_forward_hook(lambda module, args, out: LOG.append(float(out.detach().mean())))
    return model


# -- fake_cache


@functools.lru_cache
def mask_of(size: int) -> torch.Tensor:
    return torch.full((size, size), -1e9).triu(1)


MASKS: dict[int, torch.Tensor] = {}


class Tables:
    """Positions by length, made when first asked for."""

    def __init__(self) -> None:
        self.made: dict[int, torch.Tensor] = {}

    def get(self, size: int) -> torch.Tensor:
        if size not in self.made:
            self.made[size] = torch.full((size, size), -1e9).triu(1)
        return self.made[size]


class Attention(nn.Module):
    """Masks from a function's cache, a global dict, a class attribute and an object."""

    mask: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mlp, self.tables = nn.Linear(DIM, 3 * DIM), Mlp(), Tables()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        size = x.shape[1]
        if Attention.mask is None:
            Attention.mask = torch.full((size, size), -1e9).triu(1)
        masks = MASKS.setdefault(size, self.tables.get(size)) + mask_of(size) + Attention.mask
        return self.mlp(x + (q @ k.transpose(1, 2) + masks).softmax(-1) @ v)


def attention() -> nn.Module:
    mask_of.cache_clear()
    MASKS.clear()
    Attention.mask = None
    return stack(Attention)()


class CachedProperty(Mlp):
    """A table that is made at its first use."""

    @functools.cached_property
    def table(self) -> torch.Tensor:
        return torch.arange(DIM).float().cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.table)


POSITIONS: Any = weakref.WeakKeyDictionary()


class WeaklyCached(Mlp):
    """A table by module in a dictionary of weak references, and one in a function's attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self not in POSITIONS:
            POSITIONS[self] = torch.linspace(0, 1, DIM)
        return super().forward(x + POSITIONS[self] + scaled(DIM))


def scaled(size: int) -> torch.Tensor:
    known = scaled.__dict__.setdefault("tables", {})
    if size not in known:
        known[size] = torch.full((size,), 0.1)
    return known[size]


# -- observer_buffers


def observed() -> nn.Module:
    from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

    class Observed(Mlp):
        """Weights quantised per channel; the observer's buffers grow in their first forward."""

        def __init__(self) -> None:
            super().__init__()
            self.fake = FakeQuantize(
                MovingAveragePerChannelMinMaxObserver,
                quant_min=-128,
                quant_max=127,
                dtype=torch.qint8,
                qscheme=torch.per_channel_symmetric,
                ch_axis=0,
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up = functional.linear(x, self.fake(self.up.weight), self.up.bias)
            return x + self.down(torch.tanh(up))

    return stack(Observed)()


class Growing(Mlp):
    """A buffer that is rebound to a longer one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.detach()[:2]])[-5:]
        return super().forward(x) + self.seen.mean(0)


class Resized(Mlp):
    """A buffer that is given its size in place by the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale.numel() == 0:
            self.scale.resize_(x.shape[-1]).copy_(x.detach().std(0))
        else:
            self.scale.lerp_(x.detach().std(0), 0.1)
        return super().forward(x / (1 + self.scale))


# -- fit_side_effects


def in_backward() -> nn.Module:
    """Weights that hooks change during backward."""

    def update(p: torch.Tensor) -> None:
        with torch.no_grad():
            assert p.grad is not None
            p.add_(p.grad, alpha=-0.1)
            p.grad = None

    model = stack(Mlp)()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return model


class Momentum(nn.Module):
    """A key encoder that follows the query encoder in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = stack(Mlp)(), stack(Mlp)().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                k.data = k.data * 0.9 + q.data * 0.1
            key = self.key(x)
        return self.query(x) - key


class NormalisesItsInput(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.sub_(0.5).div_(2.0))


class Queue(nn.Module):
    """A queue of keys, written in place at a pointer, both buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack(Mlp)()
        self.register_buffer("queue", torch.randn(4 * 32, DIM))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        scores = out @ self.queue.clone().T
        at = int(self.at)
        self.queue[at : at + len(x)] = out.detach()
        self.at[0] = (at + len(x)) % len(self.queue)
        return scores


class Codebook(nn.Module):
    """Vector quantisation whose codes are moving averages, parameters without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = stack(Mlp)(), stack(Mlp)()
        self.codes = nn.Parameter(torch.randn(8, DIM), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        nearest = torch.cdist(h.detach(), self.codes).argmin(-1)
        chosen = self.codes[nearest]
        with torch.no_grad():
            self.codes.index_add_(0, nearest, h.detach() - chosen, alpha=0.05)
        return self.last(h + (chosen - h).detach())


def program(kind: str, name: str, make: Any, **rest: Any) -> Program:
    return Program(kind=kind, name=name, make=make, **rest)


def batch_of_own() -> tuple[torch.Tensor]:
    return (rows().requires_grad_(),)


def with_gradient(training: Any) -> torch.Tensor:
    """A step that reads and changes the batch by the batch's own gradient."""
    (x,) = training.batch
    training.optimizer.zero_grad()
    loss = training.loss()
    loss.backward()
    training.optimizer.step()
    with torch.no_grad():
        x -= 0.01 * x.grad.sign()
    return torch.cat([loss.detach()[None], x.detach().flatten(), x.grad.flatten()])


PROGRAMS = [
    program("object_state", "every listed container", stack(KeepsEverything), left=states),
    program("object_state", "a hook that appends to a list outside", hooked, left=lambda m: list(LOG)),
    program("object_state", "a deque of past means, a set", stack(History), left=states),
    program("object_state", "an iterator, a closure's cell", stack(Wrapped), left=states),
    program(
        "fake_cache",
        "lru_cache, global dict, class attribute, object",
        attention,
        batch=lambda: (rows(4, 64 * DIM).view(-1, 16, DIM),),
    ),
    program("fake_cache", "cached_property", stack(CachedProperty)),
    program("fake_cache", "weak dictionary, function attribute", stack(WeaklyCached)),
    program("observer_buffers", "per-channel fake quantisation", observed),
    program("observer_buffers", "a buffer that is rebound to a longer one", stack(Growing)),
    program("observer_buffers", "a buffer that its first batch resizes", stack(Resized)),
    program("fit_side_effects", "optimizer in backward", in_backward),
    program("fit_side_effects", "momentum encoder (MoCo)", Momentum),
    program("fit_side_effects", "batch that requires a gradient", stack(Mlp), batch=batch_of_own, step=with_gradient),
    program("fit_side_effects", "input normalised in place", lambda: NormalisesItsInput(Mlp(), Mlp(), Mlp())),
    program("fit_side_effects", "a queue of keys in a buffer", Queue, batch=lambda: (rows(32),)),
    program("fit_side_effects", "a codebook of moving averages", Codebook),
]
