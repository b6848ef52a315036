"""Sparse gradients, buffers and batches, COO and CSR."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from recoup.errors import RecoupError
from tests.safety.helpers import Block, fakes_left, fit


def graph() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 200, (2, 900), generator=generator)
    return torch.sparse_coo_tensor(
        index, torch.rand(900, generator=generator), (200, 200), check_invariants=False
    ).coalesce()


def uncoalesced() -> torch.Tensor:
    index = torch.zeros(2, 3, dtype=torch.long)
    return torch.sparse_coo_tensor(index, torch.ones(3), (200, 200), check_invariants=False)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return x + functional.gelu(torch.sparse.mm(adjacency, functional.gelu(self.linear(x))))


class GraphNet(nn.Module):
    def __init__(self, adjacency: torch.Tensor | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.register_buffer("adjacency", adjacency)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.adjacency if adjacency is None else adjacency)
        return x


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 32, sparse=True)
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.table(ids))


X, IDS = torch.randn(200, 32), torch.randint(0, 500, (32, 32))
CASES: dict[str, Any] = {
    "COO buffer": lambda: (GraphNet(graph()), (X,)),
    "CSR buffer": lambda: (GraphNet(graph().to_sparse_csr()), (X,)),
    "COO in the batch": lambda: (GraphNet(), (X, graph())),
    "CSR in the batch": lambda: (GraphNet(), (X, graph().to_sparse_csr())),
    "uncoalesced": lambda: (GraphNet(), (X, uncoalesced())),
    "Embedding": lambda: (Words(), (IDS,)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", CASES)
def test_sparse_tensors_are_followed(name: str) -> None:
    torch.manual_seed(0)
    model, batch = CASES[name]()
    fitted = fit(model, batch, budget="85%")
    assert fitted.evidence.exact, fitted.evidence.differences
    assert fitted.evidence.peak_bytes <= fitted.plan.budget_bytes
    assert fakes_left() == 0


def test_sparse_adam_counts_its_state() -> None:
    model = Words()
    fitted = fit(model, (IDS,), optimizer=torch.optim.SparseAdam(model.table.parameters()))
    assert fitted.evidence.exact
    assert fitted.plan.predicted.peak_bytes == pytest.approx(fitted.evidence.peak_bytes, rel=0.02)


def test_an_optimizer_that_refuses_the_gradients_is_named() -> None:
    model = Words()
    with pytest.raises(RecoupError, match="SparseAdam"):
        fit(model, (IDS,), optimizer=torch.optim.SparseAdam)
    assert all(p.grad is None for p in model.parameters())
