"""How activation checkpointing goes wrong, row by row: plain torch's checkpoint and recoup on the same small models.

    make hazards        (python -m bench.hazards)

Each row runs one training step three times from the same state: as it is, with `torch.utils.checkpoint` (non-reentrant)
on the named modules, and with recoup on the same modules. What the step leaves (loss, gradients, buffers, attributes,
the next random numbers) is compared bit for bit with the step as it is. The programs of `bench.programs` are trained
with a call of `fit` before and without. Writes docs/hazards.md.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import recoup
from bench.programs.all import PROGRAMS
from bench.programs.program import outcome
from recoup.cost.model import FlopsCost
from recoup.ir.decision import Recompute
from recoup.runtime.apply import apply_decisions

OUTPUT = Path(__file__).parents[1] / "docs" / "hazards.md"
WIDTH = 8
SETTINGS = {"scale": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One hazard.

    Attributes:
        make: builds the model. step: runs a step on it and returns what it leaves. regions: modules run twice.
        options: for torch's checkpoint. by_torch: runs the step torch's way where that is not a wrapped module.
        planned: recoup chooses the regions itself, for the smallest budget (`step` takes the batch).
    """

    name: str
    make: Callable[[], nn.Module]
    step: Callable[[nn.Module], Any]
    regions: tuple[str, ...] = ("body",)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    by_torch: Callable[[nn.Module], Any] | None = None
    planned: bool = False


ROWS: list[Row] = []


def row(name: str, make: Callable[[], nn.Module], **rest: Any) -> Callable[[Any], Any]:
    def add(step: Any) -> Any:
        ROWS.append(Row(name=name, make=make, step=step, **rest))
        return step

    return add


class Net(nn.Module):
    """stem, body, head: the body is the region."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.body = body
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.head(self.body(self.stem(x), *args, **kwargs))


class Body(nn.Module):
    """Linear, tanh, and a function of what comes between; the function is given."""

    def __init__(self, between: Callable[..., torch.Tensor] | None = None, **attributes: Any) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.between = between
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        if self.between is not None:
            h = self.between(self, h, *args, **kwargs)
        return torch.tanh(self.down(h * h))


def net(between: Callable[..., torch.Tensor] | None = None, **attributes: Any) -> Callable[[], nn.Module]:
    return lambda: Net(Body(between, **{k: v() if callable(v) else v for k, v in attributes.items()}))


def inputs(seed: int = 3, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (16, WIDTH), generator=torch.Generator().manual_seed(seed))


def left(model: nn.Module, *more: Any) -> list[Any]:
    """Returns what a step leaves behind."""
    found: list[Any] = list(more)
    found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    found += [b.clone() for b in model.buffers()]
    return [*found, torch.rand(2), random.random(), float(np.random.rand())]


def train(model: nn.Module, *args: Any, meanwhile: Callable[[], Any] | None = None, **kwargs: Any) -> list[Any]:
    loss = model(*args, **kwargs).square().sum()
    if meanwhile is not None:
        meanwhile()
    loss.backward()
    return left(model, loss.detach())


# -- state

NORM = lambda: Net(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()))  # noqa: E731


@row("BatchNorm in a region", NORM)
def _(m: nn.Module) -> Any:
    return train(m, inputs())


@row("the same, checkpointing set up in eval mode", lambda: NORM().eval())
def _(m: nn.Module) -> Any:
    return train(m.train(), inputs())


class Neuron(nn.Module):
    """Leaky integrate-and-fire with a soft spike; the membrane potential is an attribute."""

    def __init__(self, zeros: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.v: Any = torch.zeros(16, WIDTH) if zeros else 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.v = 0.9 * self.v + torch.tanh(self.fc(x))
        spike = torch.sigmoid(4 * (self.v - 0.5))
        self.v = self.v * (1 - spike)
        return spike


class Loop(nn.Module):
    def __init__(self, zeros: bool) -> None:
        super().__init__()
        self.cell = Neuron(zeros)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.cell(x * t) for t in (0.5, 1.0, 1.5, 2.0)]).sum(0)


def train_neuron(m: Any) -> Any:
    found = train(m, inputs())
    return [*found, m.body.cell.v.detach()]


for zeros in (False, True):
    start = ", v zeros at the start" if zeros else ""
    make_loop = lambda zeros=zeros: Net(Loop(zeros))  # noqa: E731
    row(f"neuron keeping `self.v`, each step a region{start}", make_loop, regions=("body.cell",))(train_neuron)
    row(f"neuron keeping `self.v`, the whole loop a region{start}", make_loop)(train_neuron)
row("neuron keeping `self.v`, planned by recoup", lambda: Net(Loop(False)), regions=("body.cell",), planned=True)(
    train_neuron
)


def _count(b: Any, h: torch.Tensor) -> torch.Tensor:
    b.calls += 1
    return h * b.calls


@row("counter attribute read and raised in a region", net(_count, calls=0))
def _(m: Any) -> Any:
    return [*train(m, inputs()), m.body.calls]


def _average(b: Any, h: torch.Tensor) -> torch.Tensor:
    b.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return h * (1 + b.mean)


def _with_buffer() -> nn.Module:
    body = Body(_average)
    body.register_buffer("mean", torch.ones(WIDTH))
    return Net(body)


row("buffer changed in place in a region", _with_buffer)(lambda m: train(m, inputs()))


def _with_large_buffer() -> nn.Module:
    body = Body(lambda b, h: (b.table.mul_(0.9).add_(h.detach().mean()), h * b.table[0, 0])[1])
    body.register_buffer("table", torch.ones(256, 256))
    return Net(body)


row("large buffer changed in place in a region", _with_large_buffer)(lambda m: train(m, inputs()))
row("large buffer changed in place, planned by recoup", _with_large_buffer, planned=True)(lambda m: train(m, inputs()))
row("tensor attribute changed in place in a region", net(_average, mean=lambda: torch.ones(WIDTH)))(
    lambda m: [*train(m, inputs()), m.body.mean]
)


def _append(b: Any, h: torch.Tensor) -> torch.Tensor:
    b.cache.append(h)
    return torch.stack(list(b.cache)).sum(0)


@row("list kept on the module, appended to in a region", net(_append, cache=list))
def _(m: Any) -> Any:
    return [*train(m, inputs()), len(m.body.cache)]


# -- randomness

row("python `random` in a region", net(lambda b, h: h * random.random()))(lambda m: train(m, inputs()))
row("numpy's global stream in a region", net(lambda b, h: h * float(np.random.rand())))(lambda m: train(m, inputs()))


def _draw(b: Any, h: torch.Tensor, generator: Any = None) -> torch.Tensor:
    return h * torch.rand(h.shape, generator=generator or b.stream)


@row("`torch.Generator` kept on the module", net(_draw, stream=lambda: torch.Generator().manual_seed(1)))
def _(m: Any) -> Any:
    return [*train(m, inputs()), m.body.stream.get_state()]


@row("`torch.Generator` as an argument", net(_draw))
def _(m: Any) -> Any:
    stream = torch.Generator().manual_seed(2)
    return [*train(m, inputs(), generator=stream), stream.get_state()]


_stream = torch.Generator()


@row("`torch.Generator` in a global variable", net(lambda b, h: h * torch.rand(h.shape, generator=_stream)))
def _(m: Any) -> Any:
    _stream.manual_seed(4)
    return [*train(m, inputs()), _stream.get_state()]


@row(
    "numpy `Generator` kept on the module",
    net(lambda b, h: h * float(b.stream.random()), stream=lambda: np.random.default_rng(0)),
)
def _(m: Any) -> Any:
    return [*train(m, inputs()), m.body.stream.random()]


DROP = lambda: Net(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)))  # noqa: E731
row("dropout", DROP)(lambda m: train(m, inputs()))
row("dropout, `preserve_rng_state=False`", DROP, options={"preserve_rng_state": False})(lambda m: train(m, inputs()))

# -- what changes between forward and backward


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Body() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _late(m: Any) -> Any:
    h = inputs().requires_grad_()
    for layer in m.layers:
        h = checkpoint(lambda t: layer(t), h, use_reentrant=False)  # noqa: B023
    loss = h.square().sum()
    loss.backward()
    return left(m, loss.detach())


THREE = ("layers.0", "layers.1", "layers.2")
row("late-binding closure `lambda t: layer(t)`", Layers, regions=THREE, by_torch=_late)(lambda m: train(m, inputs()))


@row("attribute flag changed before backward", net(lambda b, h: h.exp() * 3 if b.flag else h, flag=True))
def _(m: Any) -> Any:
    return train(m, inputs(), meanwhile=lambda: setattr(m.body, "flag", False))


@row("global setting changed before backward", net(lambda b, h: h + SETTINGS["scale"]))
def _(m: nn.Module) -> Any:
    SETTINGS["scale"] = 1.0
    return train(m, inputs(), meanwhile=lambda: SETTINGS.update(scale=2.0))


row("`eval()` before backward, dropout inside", DROP)(lambda m: train(m, inputs(), meanwhile=m.eval))


@row("forward hook removed before backward, it changed values", net())
def _(m: Any) -> Any:
    handle = m.body.up.register_forward_hook(lambda mod, args, out: out.mul(2.0))
    return train(m, inputs(), meanwhile=handle.remove)


@row("forward hook removed before backward, it changed the op count", net())
def _(m: Any) -> Any:
    handle = m.body.up.register_forward_hook(lambda mod, args, out: out.exp().sin())
    return train(m, inputs(), meanwhile=handle.remove)


@row("weights updated before backward", net())
def _(m: Any) -> Any:
    def change() -> None:
        with torch.no_grad():
            m.body.down.weight.add_(1.0)

    return train(m, inputs(), meanwhile=change)


def _mutating(name: str, between: Any, call: Callable[[nn.Module, torch.Tensor], Any]) -> None:
    def step(m: nn.Module) -> Any:
        extra = inputs(5)
        loss = call(m, extra).square().sum()
        extra.mul_(-3.0)
        loss.backward()
        return left(m, loss.detach())

    row(f"input changed after forward: {name}", net(between))(step)


_mutating("positional", lambda b, h, e: h * e, lambda m, e: m(inputs(), e))
_mutating("keyword", lambda b, h, *, e: h * e, lambda m, e: m(inputs(), e=e))
_mutating("nested in a dict", lambda b, h, d: h * d["a"][0], lambda m, e: m(inputs(), {"a": [e]}))
_held: list[torch.Tensor] = []


def _call_with_closure(m: nn.Module, e: torch.Tensor) -> Any:
    _held[:] = [e]
    return m(inputs())


_mutating("closure", lambda b, h: h * _held[0], _call_with_closure)


@row("autocast left before backward", net())
def _(m: nn.Module) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        out = m(inputs())
    loss = out.float().square().sum()
    loss.backward()
    return left(m, loss.detach())


@row("iterator of a list as an argument", net(lambda b, h, it: h * next(it, 0.0)))
def _(m: nn.Module) -> Any:
    return train(m, inputs(), iter([2.0, 3.0]))


@row("generator as an argument", net(lambda b, h, it: h * next(it, 0.0)))
def _(m: nn.Module) -> Any:
    return train(m, inputs(), (scale for scale in (2.0, 3.0)))


_nonce = [0]


def _route(b: Any, h: torch.Tensor) -> torch.Tensor:
    _nonce[0] += 1
    order = torch.arange(h.shape[0]).roll(_nonce[0] * b.shift)
    first, second = order[: 8 + _nonce[0] * b.uneven], order[8 + _nonce[0] * b.uneven :]
    return torch.cat([h[first].exp(), h[second].sin()])


@row("MoE routing flips at replay, same counts", net(_route, shift=1, uneven=0))
def _(m: nn.Module) -> Any:
    _nonce[0] = 0
    return train(m, inputs())


@row("MoE routing flips at replay, other counts", net(_route, shift=0, uneven=1))
def _(m: nn.Module) -> Any:
    _nonce[0] = 0
    return train(m, inputs())


# -- in place, caches, side outputs

INPLACE = lambda: Net(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)))  # noqa: E731
row("in-place ReLU on the region's input", INPLACE)(lambda m: train(m, inputs()))
row("in-place ReLU on the region's input, planned by recoup", INPLACE, planned=True)(lambda m: train(m, inputs()))


@row("in-place op on a tensor saved in the region", net(lambda b, h: h.exp().mul_(2.0)))
def _(m: nn.Module) -> Any:
    return train(m, inputs())


row("in-place ReLU inside a region", net(lambda b, h: torch.relu_(b.up(h))))(lambda m: train(m, inputs()))


def _cache(b: Any, h: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
    cache["k"] = torch.cat([cache["k"], h]) if "k" in cache else h
    return h + cache["k"].mean(0)


class WithCache(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Body(_cache) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache: dict[str, Any] = {}
        for layer in self.layers:
            x = layer(x, cache)
        return x


row("dict passed in and rewritten in a layer loop", WithCache, regions=THREE)(lambda m: train(m, inputs()))


def _side(b: Any, h: torch.Tensor, side: dict[str, Any]) -> torch.Tensor:
    side["aux"] = b.up(h)
    return h


@row("side output through a dict", net(_side))
def _(m: nn.Module) -> Any:
    side: dict[str, Any] = {}
    loss = m(inputs(), side).square().sum() + side["aux"].square().sum()
    loss.backward()
    return left(m, loss.detach())


@row(
    "frozen embedding before a trainable region", lambda: nn.Sequential(nn.Embedding(9, WIDTH), Body()), regions=("1",)
)
def _(m: Any) -> Any:
    m[0].requires_grad_(False)
    return train(m, torch.arange(8))


@dataclasses.dataclass
class Out:
    hidden: torch.Tensor
    note: str = ""


class Wrapped(Body):
    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return Out(super().forward(x.hidden if isinstance(x, Out) else x), "done")


@row("dataclass output", lambda: Wrapped(), regions=("",))
def _(m: nn.Module) -> Any:
    loss = m(inputs()).hidden.square().sum()
    loss.backward()
    return left(m, loss.detach())


@row("dataclass argument", lambda: Wrapped(), regions=("",))
def _(m: nn.Module) -> Any:
    x = inputs().requires_grad_()
    loss = m(Out(x * 2)).hidden.square().sum()
    loss.backward()
    return left(m, loss.detach(), x.grad)


class Attention(nn.Module):
    """Takes the packed path if the very same tensor is query and key, as `nn.MultiheadAttention` does."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        if query is key:
            a, b = self.both(query).chunk(2, -1)
        else:
            a, b = (nn.functional.linear(x, w) for x, w in zip((query, key), self.both.weight.chunk(2), strict=True))
        return torch.tanh(a) * torch.tanh(b)


class SelfAttention(Net):
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        h = self.stem(x)
        return self.head(self.body(h, h))


row("one tensor as two arguments (`query is key`)", lambda: SelfAttention(Attention()))(lambda m: train(m, inputs()))

# -- transforms


@row("double backward", net())
def _(m: nn.Module) -> Any:
    x = inputs().requires_grad_()
    (gradient,) = torch.autograd.grad(m(x).sin().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return left(m, gradient.detach(), x.grad)


@row("`retain_graph`, backward twice", net())
def _(m: nn.Module) -> Any:
    loss = m(inputs()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return left(m, loss.detach())


@row("forward mode (`torch.func.jvp`)", net())
def _(m: nn.Module) -> Any:
    return list(torch.func.jvp(m, (inputs(),), (inputs(6),)))


@row("`vmap` of the forward", net())
def _(m: nn.Module) -> Any:
    return [torch.func.vmap(m)(inputs(3, 4, 16, WIDTH)).detach()]


@row("`torch.func.grad`", net())
def _(m: nn.Module) -> Any:
    return [torch.func.grad(lambda x: m(x).square().sum())(inputs())]


@row("`no_grad`", net())
def _(m: nn.Module) -> Any:
    with torch.no_grad():
        return [m(inputs())]


row("the whole model as one region", net(), regions=("",))(lambda m: train(m, inputs()))

# -- structure


def _structure(m: nn.Module) -> Any:
    twin = copy.deepcopy(m)
    found = train(twin, inputs())
    names = [list(m.state_dict()), [n for n, _ in m.named_parameters()], type(m.get_submodule("body")).__name__]
    return [*found, *names, all(p.grad is None for p in m.parameters())]


def _structure_by_torch(m: Any) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    m.body = checkpoint_wrapper(m.body)
    return _structure(m)


row("names, types and deepcopy (`checkpoint_wrapper`)", net(), by_torch=_structure_by_torch)(_structure)


# -- a language model with its cache left on


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=32
    )
    config._attn_implementation = "eager"
    return LlamaForCausalLM(config).train()


def _train_llama(m: Any) -> Any:
    ids = torch.arange(16)[None] % 7
    loss = m(input_ids=ids, labels=ids).loss
    loss.backward()
    return left(m, loss.detach())


LLAMA = ("model.layers.0", "model.layers.1")
row("KV-cache language model, `use_cache` left on", _llama, regions=LLAMA)(_train_llama)
row("the same in `eval()` with gradients", lambda: _llama().eval(), regions=LLAMA)(_train_llama)


@row("KV cache handed in by the caller", _llama, regions=LLAMA)
def _(m: Any) -> Any:
    from transformers import DynamicCache

    ids, cache = torch.arange(16)[None] % 7, DynamicCache()
    loss = m(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True).loss
    loss.backward()
    return [*left(m, loss.detach()), cache.get_seq_length()]


# -- running them


def _seeded(item: Row) -> nn.Module:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = item.make()
    torch.manual_seed(1)
    return model


def _checkpointed(model: nn.Module, item: Row) -> None:
    for path in item.regions:
        module = model.get_submodule(path)
        module.forward = _Checkpointed(module.forward, item.options)  # type: ignore[method-assign]


class _Checkpointed:
    def __init__(self, forward: Any, options: dict[str, Any]) -> None:
        self.forward = forward
        self.options = options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.forward, *args, use_reentrant=False, **self.options, **kwargs)


def _planned(model: nn.Module) -> Any:
    budget: int | str = "30%"
    for _ in range(2):
        try:
            loss = lambda out, batch: out.square().sum()  # noqa: E731
            plan = recoup.plan(model, inputs(), budget=budget, loss=loss, cost=FlopsCost())
            return recoup.apply(model, plan)
        except recoup.InfeasibleBudget as error:
            budget = error.minimum_bytes
    raise AssertionError("the smallest budget must be feasible")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    return bool(a == b)


def plain_outcome(item: Row) -> Any:
    """Returns what the step leaves without checkpointing, or the exception it ends in."""
    try:
        return item.step(_seeded(item))
    except Exception as error:  # whatever plain raises is the outcome to compare with
        return error


def run_row(item: Row, way: str) -> str:
    """Returns "exact", "refused: <message>" or "silently wrong" for a way ("torch", "recoup").

    "refused, as plain" says that the step without checkpointing raises as well.
    """
    expected = plain_outcome(item)
    raised = isinstance(expected, Exception)
    model = _seeded(item)
    try:
        if way == "torch":
            if item.by_torch is not None:
                found = item.by_torch(model)
            else:
                _checkpointed(model, item)
                found = item.step(model)
        elif item.planned:
            with torch.random.fork_rng():
                applied = _planned(model)
            found = item.step(model)
            applied.remove()
        else:
            with apply_decisions(model, [Recompute(path=p) for p in item.regions]):
                found = item.step(model)
    except Exception as error:  # any exception is a refusal: the row says which
        return f"refused{', as plain' if raised else ''}: {_short(error)}"
    return "exact" if not raised and _same(expected, found) else "silently wrong"


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 170 else text[:167] + '...'}"


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(outcomes: list[tuple[str, str, str]], programs: list[tuple[str, str, str]]) -> str:
    """Returns the document.

    Args:
        outcomes: hazard, torch's outcome, recoup's. programs: kind, program, outcome of `fit`.
    """
    num_exact = sum(o[2].startswith("exact") for o in programs)
    num_refused = sum(o[2].startswith("refused") for o in programs)
    wrong = [sum(o[i] == "silently wrong" for o in outcomes) for i in (1, 2)]
    exact = [sum(o[i] == "exact" for o in outcomes) for i in (1, 2)]
    lines = [
        "# Hazards",
        "",
        f"Written by `make hazards` (minutes; torch {torch.__version__}, CPU). {len(outcomes)} ways in which "
        "activation",
        "checkpointing goes wrong for people, each run with `torch.utils.checkpoint(use_reentrant=False)` and with",
        "recoup on the same modules and compared bit for bit with the same step without checkpointing: loss,",
        'gradients, buffers, attributes, the next random numbers. "Refused, as plain": the step without checkpointing',
        "raises too.",
        "",
        "| | exact | refused | silently wrong |",
        "|---|---|---|---|",
        *(
            f"| {way} | {exact[i]} | {len(outcomes) - exact[i] - wrong[i]} | {wrong[i]} |"
            for i, way in enumerate(("torch", "recoup"))
        ),
        "",
        "| hazard | torch | recoup |",
        "|---|---|---|",
        *map(_row, outcomes),
        "",
        "recoup compares a few bytes of every tensor that a region saves with what its second forward saves there, on",
        "the CPU only: on a GPU that would wait for the device. What neither a module, its arguments nor the global",
        "random streams hold (a global setting, a generator in a global variable, a routing decision made from",
        "outside) is therefore noticed on the CPU and not on a GPU. A change that misses every sampled byte is not",
        "noticed either; `recoup.verify` compares whole values.",
        "",
        "## Programs around `fit`",
        "",
        f"{len(programs)} small trainings, each with `recoup.fit` before it (60 % of the peak, or the least there is)",
        f"and without. Exact ({num_exact}): `fit` was within its budget, and after three steps losses, weights,",
        "buffers, gradients, random streams and whatever else the step changes are equal bit for bit.",
        f"Refused, and nothing touched ({num_refused}): `fit` raised, and the training after it is equal all the same.",
        f"Anything else: {len(programs) - num_exact - num_refused}.",
        "",
        "| kind | program | `recoup.fit` |",
        "|---|---|---|",
        *map(_row, programs),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs every row and writes the document."""
    warnings.simplefilter("ignore")
    outcomes = []
    for item in ROWS:
        outcomes.append((item.name, run_row(item, "torch"), run_row(item, "recoup")))
        print(" | ".join(outcomes[-1]))
    programs = []
    for program in PROGRAMS:
        became = outcome(program)
        programs.append(
            (program.kind.replace("_", " "), program.name, became if len(became) < 300 else became[:297] + "...")
        )
        print(" | ".join(programs[-1]))
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(table(outcomes, programs))


if __name__ == "__main__":
    main()
