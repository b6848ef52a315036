"""Lazy, jagged and sparse tensors; scripts; forwards of every kind."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bench.programs.forwards import words
from bench.programs.program import DIM, Mlp, Program, many, rows, stack

# -- lazy_jagged


class Jagged(nn.Module):
    """Jagged nested tensors, handed in or made inside."""

    def __init__(self, makes: bool) -> None:
        super().__init__()
        self.up, self.down, self.makes = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM), makes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.makes:
            x = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 10, 40, ROWS_JAGGED]))
        return (x + self.down(functional.gelu(self.up(x)))).values()


ROWS_JAGGED = 96


def jagged() -> tuple[torch.Tensor]:
    parts = list(rows(ROWS_JAGGED).split([10, 30, 56]))
    return (torch.nested.nested_tensor(parts, layout=torch.jagged),)


class Pooled(Mlp):
    """A jagged batch is padded inside, and pooled by sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.nested.to_padded_tensor(x, 0.0)).mean(1)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(64), nn.GELU(), nn.LazyLinear(8))


def lazy_convolutions() -> nn.Module:
    return nn.Sequential(nn.LazyConv1d(16, 3, padding=1), nn.LazyBatchNorm1d(), nn.GELU(), nn.LazyConv1d(4, 1))


def sequences() -> tuple[torch.Tensor]:
    return (rows(8, 4 * 20).view(8, 4, 20),)


class LateOptimizer:
    """Made when the first step asks for it, as training with lazy modules does."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.inner = model, None  # type: Any, Any

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def step(self) -> None:
        if self.inner is None:
            self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.inner.step()


# -- sparse


def adjacency(layout: torch.layout = torch.sparse_coo, size: int = 96) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    made = torch.sparse_coo_tensor(
        torch.randint(0, size, (2, 4 * size), generator=generator),
        torch.rand(4 * size, generator=generator),
        (size, size),
        check_invariants=False,
    ).coalesce()
    return made if layout is torch.sparse_coo else made.to_sparse_csr()


class GraphNet(nn.Module):
    """Graph convolutions whose adjacency is a buffer, or is handed from layer to layer."""

    def __init__(self, buffer: torch.Tensor | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(4)])
        self.register_buffer("adjacency", buffer)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor | None = None) -> torch.Tensor:
        mixing = self.adjacency if adjacency is None else adjacency
        for layer in self.layers:
            x = x + torch.relu(torch.sparse.mm(mixing, layer(x)))
        return x


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(200, DIM, sparse=True), stack(Mlp)()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(ids))


class LearnedGraph(Mlp):
    """A sparse matrix made of a parameter in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(40)
        size = (len(x), len(x))
        mixing = torch.sparse_coo_tensor(torch.stack([at, at.flip(0)]), self.values, size, check_invariants=False)
        return super().forward(x) + torch.sparse.mm(mixing, x)


class SparseSoftmax(Mlp):
    """Attention over the edges of a graph: sampled products, a sparse softmax, back to dense."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        edges = adjacency(size=len(x)).indices()
        scores = (x[edges[0]] * x[edges[1]]).sum(-1)
        mixing = torch.sparse_coo_tensor(edges, scores, (len(x), len(x)), is_coalesced=True, check_invariants=False)
        return super().forward(torch.sparse.mm(torch.sparse.softmax(mixing, 1), x))


# -- torchscript


def scripted() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), torch.jit.script(ScriptBlock()), nn.Linear(DIM, 4))


def traced() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), torch.jit.trace(ScriptBlock(), torch.randn(4, DIM)), nn.Linear(DIM, 4))


class ScriptBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@functools.cache
def activation() -> Any:
    return torch.jit.script(_activation)


def _activation(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x + b
    return y * torch.tanh(y)


class EndsInScript(nn.Module):
    """A scripted function is the last thing of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(DIM, DIM, bias=False), nn.Parameter(torch.zeros(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + activation()(self.linear(functional.silu(x)), self.bias)


class Bare(Mlp):
    """Catches everything."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        try:
            return x + torch.tanh(self.down(torch.tanh(h)))
        except:  # noqa: E722
            return x + self.down(torch.relu(h))


def frozen_script() -> nn.Module:
    """A frozen scripted feature extractor, whose weights are constants of the graph."""
    extractor = torch.jit.freeze(torch.jit.script(ScriptBlock().eval()))
    return nn.Sequential(nn.Linear(DIM, DIM), extractor, Mlp(), Mlp())


class ScriptedInList(Mlp):
    """A scripted module in a list, with a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [torch.jit.script(nn.BatchNorm1d(DIM))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.others[0](x))


# -- forward_kinds


class Static(nn.Module):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


class ByClass(nn.Module):
    @classmethod
    def forward(cls, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


class Activated(Mlp):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.act = kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class Partial(Mlp):
    """Its forward is a partial in an instance attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = functools.partial(self.scaled, scale=0.5)

    def scaled(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return Mlp.forward(self, x) * scale


class Overloaded(Mlp):
    """Overrides `__call__`."""

    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x) * 0.5


def t5gemma() -> nn.Module:
    import transformers

    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    more = {"vocab_size": 50, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
    part = transformers.T5GemmaModuleConfig(**size, **more)
    config = transformers.T5GemmaConfig(encoder=part, decoder=part, vocab_size=50)
    return transformers.T5GemmaForConditionalGeneration(config).train()


def ids(length: int = 16) -> dict[str, torch.Tensor]:
    made = torch.randint(5, 50, (2, length), generator=torch.Generator().manual_seed(2))
    return {"input_ids": made, "labels": made}


def _id_batch() -> tuple[torch.Tensor]:
    return (words()[0],)


PROGRAMS = [
    *many(
        "lazy_jagged",
        {
            "a jagged batch": (lambda: Jagged(False), jagged),
            "jagged inside of a forward": lambda: Jagged(True),
            "a jagged batch that is padded inside": (Pooled, jagged),
        },
    ),
    Program(kind="lazy_jagged", name="lazy linears", make=lazy, optimizer=LateOptimizer),
    Program(
        kind="lazy_jagged",
        name="lazy convolutions and BatchNorm",
        make=lazy_convolutions,
        batch=sequences,
        optimizer=LateOptimizer,
    ),
    *many(
        "sparse",
        {
            "a COO buffer": lambda: GraphNet(adjacency()),
            "a CSR buffer": lambda: GraphNet(adjacency(torch.sparse_csr)),
            "COO in the batch": (GraphNet, lambda: (rows(), adjacency())),
            "CSR in the batch": (GraphNet, lambda: (rows(), adjacency(torch.sparse_csr))),
            "`Embedding(sparse=True)`": (Words, _id_batch),
            "a sparse matrix made of a parameter": stack(LearnedGraph),
            "a sparse softmax over edges": stack(SparseSoftmax),
        },
    ),
    Program(
        kind="sparse",
        name="the same with SparseAdam for the table",
        make=Words,
        batch=_id_batch,
        optimizer=lambda m: torch.optim.SparseAdam(m.table.parameters()),
        options=lambda training: {"optimizer": training.optimizer},
    ),
    *many(
        "torchscript",
        {
            "a scripted child": scripted,
            "a traced child": traced,
            "a scripted function ends a block": stack(EndsInScript),
            "a bare `except:`": stack(Bare),
            "a frozen script": frozen_script,
            "a scripted BatchNorm in a list": stack(ScriptedInList),
        },
        specialises=True,
    ),
    *many(
        "forward_kinds",
        {
            "a staticmethod": stack(functools.partial(Activated, Static)),
            "a classmethod": stack(functools.partial(Activated, ByClass)),
            "a partial in an attribute": stack(Partial),
            "an overridden `__call__`": stack(Overloaded),
        },
    ),
    Program(kind="forward_kinds", name="T5Gemma, `use_cache` by position", make=t5gemma, batch=ids, loss=None),
]
