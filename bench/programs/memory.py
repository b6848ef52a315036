"""Steps whose peak is not what a first look says: dropped graphs, kernels' workspaces, slices, chance, caches."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.programs.layouts import ids
from bench.programs.program import DIM, Mlp, Program, rows, stack

# -- capture_cycle


class Codes(nn.Module):
    """No gradient flows into the encoder: its graph is dropped before backward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = stack(Mlp)(), stack(Mlp)()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x * self.encoder(x).argmax(-1)[:, None])


class Discarded(Codes):
    """A sample is drawn and thrown away before the one that counts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.encoder(torch.exp(x)).sum()
        return self.decoder(torch.softmax(x, -1))


class Straight(torch.autograd.Function):
    """Runs what it is given with a graph of its own, and drops it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Any) -> torch.Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            out = run(inner)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class StraightThrough(Codes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(Straight.apply(self.decoder(x), self.encoder))


# -- lstm_estimate


class Sequence(nn.Module):
    """A recurrent kernel whose workspace no tensor shows."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.rnn, self.head = kind(DIM, 32, 2, batch_first=True, **options), nn.LazyLinear(5)
        self.head(self.rnn(torch.zeros(1, 2, DIM))[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0])


def sequences() -> tuple[torch.Tensor]:
    return (rows(8, 20 * DIM).view(8, 20, DIM),)


# -- reformer


def drawn_seed() -> int:
    seed = int(torch.randint(0, 2**31 - 1, (1,)))
    torch.manual_seed(seed)
    return seed


class Seeded(nn.Module):
    """Runs a model whose seeds are drawn from torch's stream; by themselves they are the clock's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Any) -> Any:
        with mock.patch.object(torch, "seed", drawn_seed):
            return self.inner(**batch)


def reformer() -> nn.Module:
    import transformers

    config = transformers.ReformerConfig(
        hidden_size=16,
        num_attention_heads=2,
        attention_head_size=8,
        feed_forward_size=32,
        vocab_size=50,
        attn_layers=["local", "local"],
        axial_pos_shape=[4, 4],
        axial_pos_embds_dim=[8, 8],
        local_attn_chunk_length=8,
        is_decoder=True,
    )
    return Seeded(transformers.ReformerModelWithLMHead(config).train())


class Coupled(torch.autograd.Function):
    """A reversible block: backward works its input out from its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: Any, g: Any, *weights: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        a = a + f(b)
        b = b + g(a)
        ctx.f, ctx.g, ctx.out = f, g, (a, b)
        return torch.cat([a, b], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (a, b), (f, g) = (t.detach() for t in ctx.out), (ctx.f, ctx.g)
        da, db = grad.chunk(2, -1)
        weights = [*f.parameters(), *g.parameters()]
        with torch.enable_grad():
            a = a.requires_grad_()
            ga = g(a)
        found = torch.autograd.grad(ga, [a, *g.parameters()], db, retain_graph=True)
        da, of_g = da + found[0], found[1:]
        b = (b - ga).detach()
        with torch.enable_grad():
            b = b.requires_grad_()
            fb = f(b)
        found = torch.autograd.grad(fb, [b, *f.parameters()], da, retain_graph=True)
        assert len(weights) == len(found) - 1 + len(of_g)
        return (torch.cat([da, db + found[0]], -1), None, None, *found[1:], *of_g)


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = (nn.Sequential(nn.Linear(DIM // 2, 32), nn.Tanh(), nn.Linear(32, DIM // 2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Coupled.apply(x, self.f, self.g, *self.f.parameters(), *self.g.parameters())


class CheckpointedByHand(Mlp):
    """A checkpoint of the user's own, by the reentrant variant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


# -- sliced_batch

DATA = torch.zeros(20_000, DIM)


def sliced() -> tuple[torch.Tensor]:
    DATA[:96] = rows()
    return (DATA[:96],)


def strided() -> tuple[torch.Tensor]:
    DATA[: 96 * 8 : 8] = rows()
    return (DATA[: 96 * 8 : 8],)


def two_slices() -> dict[str, torch.Tensor]:
    DATA[:192] = rows(192)
    return {"x": DATA[:96], "y": DATA[96:192]}


class TwoInputs(Codes):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.encoder(x) * self.decoder(y)


# -- stochastic_depth


class Dropped(nn.Module):
    """Each block runs by chance, of Python's stream or of torch's."""

    def __init__(self, stream: str) -> None:
        super().__init__()
        self.blocks, self.stream = nn.ModuleList([Mlp() for _ in range(6)]), stream

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            drawn = random.random() if self.stream == "python" else torch.rand(()).item()
            if drawn > 0.5:
                x = block(x)
        return x


class RandomLength(nn.Module):
    """Progressive lengths: a random part of the sequence is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack(Mlp)()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x[: random.choice([24, 48, 96])])


# -- use_cache_hybrid


def bamba() -> nn.Module:
    import transformers

    return transformers.BambaForCausalLM(
        transformers.BambaConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            vocab_size=50,
            num_key_value_heads=2,
            attn_layer_indices=[1],
            mamba_n_heads=4,
            mamba_d_head=8,
            mamba_d_state=8,
            mamba_chunk_size=8,
        )
    ).train()


def recurrent_gemma() -> nn.Module:
    import transformers

    return transformers.RecurrentGemmaForCausalLM(
        transformers.RecurrentGemmaConfig(
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=48,
            vocab_size=50,
            lru_width=16,
            attention_window_size=8,
        )
    ).train()


def mamba() -> nn.Module:
    import transformers

    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=50, state_size=4)
    return transformers.MambaForCausalLM(config).train()


def _predicted(kind: str, name: str, make: Any, **rest: Any) -> Program:
    return Program(kind=kind, name=name, make=make, predicts=True, **rest)


PROGRAMS = [
    _predicted("capture_cycle", "codes of an encoder", Codes),
    _predicted("capture_cycle", "a sample that is thrown away", Discarded),
    _predicted("capture_cycle", "a graph inside of a Function's forward", StraightThrough),
    _predicted("lstm_estimate", "an LSTM", lambda: Sequence(nn.LSTM), batch=sequences),
    _predicted(
        "lstm_estimate",
        "a bidirectional LSTM with projections",
        lambda: Sequence(nn.LSTM, bidirectional=True, proj_size=8),
        batch=sequences,
    ),
    _predicted(
        "lstm_estimate", "an RNN with dropout between layers", lambda: Sequence(nn.RNN, dropout=0.2), batch=sequences
    ),
    _predicted("reformer", "Reformer", reformer, batch=ids, loss=None),
    _predicted("reformer", "a reversible block by hand", stack(Reversible)),
    Program(
        kind="reformer",
        name="the user's own reentrant checkpoint",
        make=stack(CheckpointedByHand),
        batch=lambda: (rows().requires_grad_(),),
    ),
    _predicted("sliced_batch", "a slice of the data set", stack(Mlp), batch=sliced),
    _predicted("sliced_batch", "every eighth row", stack(Mlp), batch=strided),
    _predicted("sliced_batch", "two slices of one tensor, by name", TwoInputs, batch=two_slices),
    Program(kind="stochastic_depth", name="blocks dropped by Python's stream", make=lambda: Dropped("python")),
    Program(kind="stochastic_depth", name="blocks dropped by torch's stream", make=lambda: Dropped("torch")),
    Program(kind="stochastic_depth", name="a random part of the batch", make=RandomLength),
    Program(kind="use_cache_hybrid", name="Bamba", make=bamba, batch=ids, loss=None),
    Program(kind="use_cache_hybrid", name="RecurrentGemma", make=recurrent_gemma, batch=ids, loss=None),
    Program(kind="use_cache_hybrid", name="Mamba", make=mamba, batch=ids, loss=None),
]
