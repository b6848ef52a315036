"""Forwards that take odd arguments, compute with complex numbers, draw masks, or transform functions inside."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import torch
from torch import nn

from bench.programs.program import DIM, Mlp, many, rows, stack

# -- arguments


class Packed(nn.Module):
    """A bidirectional GRU over a PackedSequence."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, DIM)
        self.rnn = nn.GRU(DIM, DIM, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(2 * DIM, 30)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.table(ids), lengths, batch_first=True, enforce_sorted=False)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(padded)


@dataclasses.dataclass
class Masked:
    """Checks itself when it is made."""

    x: torch.Tensor
    mask: torch.Tensor

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.mask)


class Holder:
    """Is changed in place by the layers, and can be called."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __call__(self) -> torch.Tensor:
        return self.x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Pair(tuple[Any, ...]):
    """A tuple of a class of its own, whose maker wants two."""

    def __new__(cls, a: Any, b: Any) -> Pair:
        return super().__new__(cls, (a, b))


class Linked:
    """Refers to itself."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.me = x, self


def _set(held: Any, x: torch.Tensor) -> Any:
    held.x = x
    return held


def _set_item(held: Any, x: torch.Tensor) -> Any:
    held["x"] = x
    return held


def _read_x(held: Any) -> torch.Tensor:
    return held.x


# How an argument is made, read and changed.
ARGUMENTS: dict[str, tuple[Any, Any, Any]] = {
    "a defaultdict": (lambda h: collections.defaultdict(list, x=h), lambda a: a["x"], _set_item),
    "a dataclass that checks itself": (lambda h: Masked(h, h[:, 0].detach()), _read_x, lambda a, x: Masked(x, a.mask)),
    "an object with `__call__`, changed in place": (Holder, lambda a: a(), _set),
    "an object with `__slots__`, changed in place": (Slotted, _read_x, _set),
    "a subclass of tuple whose maker wants two": (lambda h: Pair(h, 1), lambda a: a[0], lambda a, x: Pair(x, a[1] + 1)),
    "an object that refers to itself": (Linked, _read_x, _set),
}


class Handing(nn.Module):
    """Blocks that hand one argument on."""

    def __init__(self, name: str) -> None:
        super().__init__()
        wrap, read, put = ARGUMENTS[name]

        class Block(Mlp):
            def forward(self, held: Any) -> Any:
                return put(held, super().forward(read(held)))

        self.blocks, self.wrap, self.read = nn.ModuleList([Block() for _ in range(3)]), wrap, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.wrap(x * 1)
        for block in self.blocks:
            held = block(held)
        return self.read(held)


def words() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 30, (8, 16), generator=generator), torch.randint(5, 17, (8,), generator=generator)


# -- complex_view, mask_zero


class Complex(nn.Module):
    """A complex product kept transposed, and a real view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.turn = nn.Linear(DIM, DIM), nn.Parameter(torch.randn(DIM, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c = torch.complex(x, torch.sin(x)) * self.turn
        mixed = c.t() @ c.conj() * 0.01
        real = torch.view_as_real(c)
        return x + self.linear((real * real.sin()).sum(-1) + mixed.real.mean() + c.abs())


class Rotary(Mlp):
    """Turns pairs of features as complex numbers, takes conjugates and imaginary parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * 1j
        return super().forward(torch.view_as_real(turned).flatten(-2)) + turned.conj().imag.repeat_interleave(2, -1)


class Spectrum(Mlp):
    """Mixes by FFT, transposed and strided."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = torch.fft.rfft(x.t(), dim=0)
        gained = f * torch.complex(f.real.tanh(), f.imag.cos())
        return super().forward(x + torch.fft.irfft(gained, n=DIM, dim=0).t() + torch.view_as_real(gained[::2]).sum())


class Noisy(Mlp):
    """Noise by a mask times a scale that may be zero or underflow."""

    scale = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.empty_like(x).bernoulli_(0.5)
        return x + x * (mask * self.scale) + super().forward(x) * mask


class Underflowing(Noisy):
    scale = 1e-43


class Nan(Mlp):
    """Masks with values that are not finite where they are off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        mask = torch.rand_like(made) > 0.3
        scores = torch.where(mask, made, torch.full_like(made, -torch.inf))
        return (scores.softmax(-1) * mask) * made


class Annealed(Mlp):
    """Dropout by hand whose scale is a buffer that goes to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rate", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (torch.rand_like(x) > 0.5).to(x.dtype)
        self.rate.mul_(0)
        return super().forward(x * mask) + x * (mask * self.rate) + torch.sin(x) * mask


# -- func_inside


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


class Physics(nn.Module):
    """A field, and what is asked of it at points."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = _net(), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        func = torch.func

        def field(point: torch.Tensor) -> torch.Tensor:
            return self.net(point).squeeze(-1)

        if self.how == "vmap(grad)":
            return func.vmap(func.grad(field))(x)
        if self.how == "vmap(hessian)":
            return func.vmap(func.hessian(field))(x)
        if self.how == "jvp":
            return func.jvp(self.net, (x,), (torch.ones_like(x),))[1]
        if self.how == "vmap":
            return func.vmap(field)(x)
        if self.how == "torch.cond":
            return torch.cond(x.sum() > 0, lambda t: self.net(t) * 2, lambda t: self.net(t), (x,))
        if self.how == "vjp of a jvp":
            _, pull = func.vjp(lambda t: func.jvp(self.net, (t,), (torch.ones_like(t),))[1], x)
            return pull(torch.ones(len(x), 1))[0]
        if self.how == "linearize":
            _, push = func.linearize(self.net, x)
            return push(torch.ones_like(x))
        return func.vmap(func.jacrev(self.net), chunk_size=8)(x)


HOWS = (
    "vmap(grad)",
    "vmap(hessian)",
    "jvp",
    "vmap",
    "torch.cond",
    "vjp of a jvp",
    "vmap(jacrev) in chunks",
    "linearize",
)


def points() -> tuple[torch.Tensor]:
    return (rows(64, 2).abs(),)


PROGRAMS = [
    *many(
        "arguments",
        {"a PackedSequence": (Packed, words)} | {name: functools.partial(Handing, name) for name in ARGUMENTS},
    ),
    *many(
        "complex_view",
        {
            "a transposed complex tensor and its real view": stack(Complex),
            "rotary embeddings, conjugates": stack(Rotary),
            "an FFT, transposed and strided": stack(Spectrum),
        },
    ),
    *many(
        "mask_zero",
        {
            "a mask times zero": stack(Noisy),
            "a mask times a scale that underflows": stack(Underflowing),
            "a mask over -inf": stack(Nan),
            "a scale that is changed to zero": stack(Annealed),
        },
    ),
    *many("func_inside", {how: (functools.partial(Physics, how), points) for how in HOWS}),
]
