"""Each strategy on each model: the layers it should choose, the bits of the plain step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from recoup.errors import ReplayError
from recoup.runtime import execution_context
from recoup.selective import CheckpointConfig, MemoryProfiler, SelectiveCheckpointer, find_layers
from recoup.selective.layers import PRESETS, explain_unmatched
from tests.models import KINDS, Block, ConvNet, Stack, make, same, step

EXACT: list[dict[str, Any]] = [
    {"strategy": "full"},
    {"strategy": "full", "every": 2},
    {"strategy": "sequential"},
    {"strategy": "sequential", "sequential_segments": 2},
    {"strategy": "selective", "memory_threshold_mb": 0.02},
    {"strategy": "none"},
]


def _applied(model: nn.Module, profiler: MemoryProfiler | None = None, **fields: Any) -> SelectiveCheckpointer:
    checkpointer = SelectiveCheckpointer(CheckpointConfig(enabled=True, **fields), profiler)
    checkpointer.apply(model)
    return checkpointer


@pytest.mark.parametrize("kind", KINDS)
def test_strategies_give_the_plain_steps_bits(kind: str) -> None:
    model, batch, loss = make(kind)
    plain = step(copy.deepcopy(model), batch, loss)
    profiler = MemoryProfiler(model, loss=loss)
    profiler.profile(batch, 1)
    for fields in EXACT:
        if kind == "conv" and fields["strategy"] == "selective":
            continue  # single ops only: recomputing one would free nothing, so none is chosen
        checkpointer = _applied(model, profiler, profile_num_runs=1, **fields)
        assert bool(checkpointer.get_checkpointed_layers()) == (fields["strategy"] != "none")
        assert same(plain, step(copy.deepcopy(model), batch, loss)), fields
        checkpointer.remove()
        assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("kind", ["stack", "gpt2", "llama"])
@pytest.mark.parametrize("policy", ["save-matmuls", "save-attention", "save-norms", "every-second-matmul"])
def test_op_policies_give_the_plain_steps_bits(kind: str, policy: str) -> None:
    model, batch, loss = make(kind)
    plain = step(copy.deepcopy(model), batch, loss)
    _applied(model, strategy="full", op_policy=policy)
    assert same(plain, step(model, batch, loss))


def test_every_kth_layer_and_segments() -> None:
    model = Stack(depth=9)
    assert _applied(copy.deepcopy(model), strategy="full", every=3).get_checkpointed_layers() == [
        "layers.0",
        "layers.3",
        "layers.6",
    ]
    checkpointer = _applied(model, strategy="sequential")
    assert checkpointer.get_checkpointed_layers() == [f"layers.{i}" for i in range(6)]  # 3 of 3, the last kept
    before = execution_context.counters()[0]
    step(model, torch.randn(4, 32))
    assert execution_context.counters()[0] - before == 2


def test_heterogeneous_sequential() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 2)
    )
    batch = torch.randn(32, 8)
    plain = step(copy.deepcopy(model), batch)
    checkpointer = _applied(model, strategy="sequential", sequential_segments=2)
    assert checkpointer.get_checkpointed_layers() == ["0", "1", "2"]
    assert same(plain, step(model, batch))


def test_presets_find_the_modules_themselves() -> None:
    gpt2, _, _ = make("gpt2")
    llama, _, _ = make("llama")
    assert PRESETS["attention"](gpt2) == [f"transformer.h.{i}.attn" for i in range(3)]
    assert PRESETS["ffn"](gpt2) == [f"transformer.h.{i}.mlp" for i in range(3)]
    assert PRESETS["embeddings"](gpt2) == ["transformer.wte", "transformer.wpe"]
    assert PRESETS["attention"](llama) == [f"model.layers.{i}.self_attn" for i in range(3)]
    assert len(PRESETS["norms"](llama)) == 7
    assert PRESETS["first"](llama) == ["model.layers.0"]
    assert PRESETS["last"](llama) == ["model.layers.2"]


class _Unnamed(nn.Module):
    """A block whose feed-forward part no name tells, beside rows of linear layers that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
        self.narrow = nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8))
        self.head = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        self.mixed = nn.Sequential(nn.Linear(8, 32), nn.Conv1d(32, 32, 1), nn.Linear(32, 8))


def test_a_feed_forward_part_is_found_by_its_shape() -> None:
    assert PRESETS["ffn"](nn.Sequential(_Unnamed(), _Unnamed())) == ["0.m", "1.m"]


def test_an_error_lists_the_presets_that_match() -> None:
    text = explain_unmatched(_Unnamed(), ["attention"], what="include_patterns")
    assert "presets that match are ffn, norms, layers, first, last)" in text


def test_include_and_exclude_by_kind() -> None:
    model, batch, loss = make("llama")
    plain = step(copy.deepcopy(model), batch, loss)
    only = _applied(model, strategy="none", include_patterns=["attention"])
    assert only.get_checkpointed_layers() == [f"model.layers.{i}.self_attn" for i in range(3)]
    assert same(plain, step(model, batch, loss))
    only.remove()
    inner = _applied(model, strategy="full", exclude_patterns=["first", "last", "norms"])
    assert inner.get_checkpointed_layers() == ["model.layers.1.self_attn", "model.layers.1.mlp"]
    assert same(plain, step(model, batch, loss))


def test_layers_of_unlike_models() -> None:
    assert find_layers(Stack()) == [f"layers.{i}" for i in range(4)]
    assert find_layers(ConvNet())[0].startswith("body.")
    assert find_layers(nn.Linear(2, 2)) == []
    nested = nn.Sequential(nn.Embedding(5, 8), nn.Sequential(*(Block(8) for _ in range(3))), nn.Linear(8, 5))
    assert find_layers(nested) == ["1.0", "1.1", "1.2"]


@pytest.mark.slow
def test_budget_is_met() -> None:
    model, batch = Stack(width=64, depth=6), torch.randn(512, 64)
    profiler = MemoryProfiler(model)
    profiler.profile(batch, 1)
    plain = step(copy.deepcopy(model), batch)
    checkpointer = _applied(model, profiler, strategy="budget", budget="70%")
    assert checkpointer.plan is not None
    assert checkpointer.plan.predicted.peak_bytes <= checkpointer.plan.budget_bytes
    assert same(plain, step(model, batch))


class _Flagged(nn.Module):
    """Takes non-tensors and keywords, and reads a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(16) for _ in range(2))

    def forward(self, x: torch.Tensor, *, scales: list[float], name: str = "a") -> torch.Tensor:
        for layer, scale in zip(self.layers, scales):
            x = layer(x, scale=scale)
        return x.square().mean()


def test_non_tensor_arguments_are_those_of_the_forward() -> None:
    torch.manual_seed(0)
    model, x = _Flagged(), torch.randn(8, 16)
    batch: dict[str, Any] = {"x": x, "scales": [0.5, 2.0]}
    plain = step(copy.deepcopy(model), batch)
    _applied(model, strategy="full")
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**batch)
    batch["scales"][0] = 100.0  # after the forward: the value then counts
    loss.backward()
    assert torch.equal(plain[1], next(model.parameters()).grad)


def test_a_changed_weight_raises() -> None:
    model = Stack()
    _applied(model, strategy="full")
    loss = model(torch.randn(4, 32))
    with torch.no_grad():
        model.layers[0].up.weight.mul_(2)
    with pytest.raises(ReplayError, match=r"layers\.0"):
        loss.backward()


def test_in_place_operations_are_exact_or_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True)) for _ in range(3)))
    batch = torch.randn(2, 3, 8, 8)
    plain = step(copy.deepcopy(model), batch)
    _applied(model, strategy="full")
    assert same(plain, step(model, batch))
    bad = nn.Sequential(*(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)) for _ in range(3)))
    _applied(bad, strategy="full")
    with pytest.raises(ReplayError, match=r"Region `1`|Region `2`"):
        step(bad, torch.randn(2, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_scaler(dtype: torch.dtype) -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = model(torch.randn(16, 32))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().clone() for p in model.parameters()]

    model = Stack()
    plain = run(copy.deepcopy(model))
    _applied(model, strategy="full")
    assert same(plain, run(model))


def test_gradient_accumulation() -> None:
    model, batches = Stack(), [torch.randn(8, 32) for _ in range(3)]
    twin = copy.deepcopy(model)
    _applied(model, strategy="sequential")
    for one in (model, twin):
        torch.manual_seed(5)
        for batch in batches:
            (one(batch) / 3).backward()
    assert same([p.grad for p in twin.parameters()], [p.grad for p in model.parameters()])


def test_gradcheck_and_double_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))).double()
    _applied(model, strategy="full")
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, (x,))
    assert torch.autograd.gradgradcheck(model, (x,))
