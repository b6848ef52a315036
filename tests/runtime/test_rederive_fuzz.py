"""Random small graphs under `rederive()` against plain autograd: the same bits, or the same kind of error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import recoup
from recoup.runtime import execution_context
from tests.thorough import IS_THOROUGH

ROWS, COLUMNS = 65, 36  # 4680 bytes in bf16: large enough to be worth rebuilding

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "scale": lambda x: x * 0.7,
    "shift": lambda x: x + 0.3,
    "rsub": lambda x: 1 - x,
    "neg": torch.neg,
    "square": lambda x: x**2,
    "cube": lambda x: x.clamp(-3, 3) ** 3,
    "sqrt": lambda x: (x.abs() + 0.1).sqrt(),
    "rsqrt": lambda x: (x * x + 0.1).rsqrt(),
    "exp": lambda x: x.clamp(max=2).exp(),
    "reciprocal": lambda x: (x.abs() + 0.5).reciprocal(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "softplus": F.softplus,
    "hardtanh": F.hardtanh,
    "masked_fill": lambda x: x.masked_fill(x > 0.5, -1.0),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "cast": lambda x: x.to(torch.bfloat16).to(x.dtype),
    "cast_up": lambda x: x.double().tanh().to(x.dtype),
    "dropout": lambda x: F.dropout(x, 0.25),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, 0),
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "column_major": lambda x: x.t().contiguous().t(),
    "swap_halves": lambda x: torch.cat(list(reversed(x.chunk(2, dim=1))), dim=1),
    "glu": lambda x: torch.cat([F.silu(x[:, :18]) * x[:, 18:]] * 2, dim=1),
    "row_mean": lambda x: x.mean(1, keepdim=True).expand(-1, x.shape[1]),
    "first_row": lambda x: x[:1].expand_as(x),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 1),
    "reshape": lambda x: x.reshape(-1).view_as(x),
    "group_norm": lambda x: F.group_norm(x, 4),
    "detach": torch.detach,
    "clone": torch.clone,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 0.5),
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "cat": lambda x, y: torch.cat([x[:, ::2], y[:, 1::2]], dim=1),
    "stack": lambda x, y: torch.stack([x, y]).amax(0),
}
IN_PLACE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "relu_": lambda x, y: F.relu_(x),
    "mul_": lambda x, y: x.mul_(0.9),
    "add_": lambda x, y: x.add_(y),
    "sigmoid_": lambda x, y: x.sigmoid_(),
    "tanh_": lambda x, y: x.tanh_(),
    "silu_": lambda x, y: F.silu(x, inplace=True),
    "half_": lambda x, y: x[:, :18].mul_(0.5),
    "row_": lambda x, y: x[0].zero_(),
    "copy_": lambda x, y: x.copy_(y),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 1, 0.5),
    "dropout_": lambda x, y: F.dropout(x, 0.2, inplace=True),
}
# With parameters: (weight of a square linear, two vectors, buffers).
LAYER = ["linear", "layer_norm", "rms_norm", "batch_norm", "affine"]

index = st.integers(0, 63)
CHOICES = [
    *(("unary", name) for name in sorted(UNARY)),
    *(("binary", name) for name in sorted(BINARY) * 3),
    *(("layer", name) for name in LAYER * 4),
    *(("fresh_in_place", name) for name in sorted(IN_PLACE)),
    *(("in_place", name) for name in sorted(IN_PLACE)),
]
instruction = st.tuples(st.sampled_from(CHOICES), index, index)
graph = st.fixed_dictionaries(
    {
        "instructions": st.lists(instruction, min_size=2, max_size=14),
        "outputs": st.lists(index, min_size=1, max_size=3),
        "frozen": st.integers(0, 7),
        "dtype": st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
        "input_grad": st.booleans(),
        "columns_first": st.booleans(),
    }
)


class Params(nn.Module):
    def __init__(self, frozen: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(COLUMNS, COLUMNS, dtype=dtype) / 6)
        self.scale = nn.Parameter(torch.rand(COLUMNS, dtype=dtype) + 0.5)
        self.shift = nn.Parameter(torch.randn(COLUMNS, dtype=dtype))
        for i, p in enumerate(self.parameters()):
            p.requires_grad_(not frozen >> i & 1)
        self.register_buffer("mean", torch.zeros(COLUMNS, dtype=dtype))
        self.register_buffer("var", torch.ones(COLUMNS, dtype=dtype))

    def run(self, name: str, x: Tensor) -> Tensor:
        shape = (COLUMNS,)
        if name == "linear":
            return F.linear(x, self.weight, self.shift)
        if name == "layer_norm":
            return F.layer_norm(x, shape, self.scale, self.shift)
        if name == "rms_norm":
            return F.rms_norm(x, shape, self.scale)
        if name == "batch_norm":
            return F.batch_norm(x, self.mean, self.var, self.scale, self.shift, training=True)
        return x * self.scale + self.shift


def forward(spec: dict[str, Any], params: Params, x: Tensor) -> Tensor:
    pool = [x.t() if spec["columns_first"] else x]
    for (kind, name), i, j in spec["instructions"]:
        a, b = pool[-1 - i % min(len(pool), 4)], pool[j % len(pool)]
        if kind == "unary":
            pool.append(UNARY[name](a))
        elif kind == "binary":
            pool.append(BINARY[name](a, b))
        elif kind == "layer":
            pool.append(params.run(name, a))
        elif kind == "fresh_in_place":  # as networks do it: over something nobody else has
            fresh = a + 0.1
            IN_PLACE[name](fresh, b)
            pool.append(fresh)
        else:
            IN_PLACE[name](a, b)
    loss = pool[-1].double().sum()
    for i in spec["outputs"]:
        loss = loss + pool[i % len(pool)].double().square().mean()
    return loss


def outcome(spec: dict[str, Any], rederive: bool) -> tuple[str, list[Tensor | None]]:
    torch.manual_seed(0)
    params = Params(spec["frozen"], spec["dtype"])
    shape = (COLUMNS, ROWS) if spec["columns_first"] else (ROWS, COLUMNS)
    x = torch.randn(shape, dtype=spec["dtype"], requires_grad=spec["input_grad"])
    try:
        if rederive:
            with recoup.rederive():
                loss = forward(spec, params, x)
        else:
            loss = forward(spec, params, x)
        loss.backward()
    except RuntimeError as error:
        return type(error).__name__, []
    grads = [x.grad if x.is_leaf else None, *(p.grad for p in params.parameters())]
    return "done", [loss.detach(), *grads, *params.buffers()]


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    nan = a.isnan()
    if not torch.equal(nan, b.isnan()):
        return False
    return torch.equal(
        a.masked_fill(nan, 0).flatten().view(torch.uint8), b.masked_fill(nan, 0).flatten().view(torch.uint8)
    )


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(spec: dict[str, Any]) -> None:
    plain_status, plain = outcome(spec, False)
    status, mine = outcome(spec, True)
    assert status == plain_status
    for position, (a, b) in enumerate(zip(plain, mine, strict=True)):
        assert same_bits(a, b), position


RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors")
@settings(max_examples=100, deadline=None, suppress_health_check=RELAXED, derandomize=True, database=None)
@given(graph)
def test_hundred_graphs(spec: dict[str, Any]) -> None:
    check(spec)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors")
@settings(max_examples=2000 if IS_THOROUGH else 500, deadline=None, suppress_health_check=RELAXED, database=None)
@given(graph)
def test_random_graphs(spec: dict[str, Any]) -> None:
    check(spec)


def test_the_graphs_do_rebuild() -> None:
    """The fuzz would prove nothing if nothing was rebuilt in it."""
    names = ["layer_norm", "linear", "affine", "batch_norm"]
    instructions: list[tuple[tuple[str, str], int, int]] = []
    for i, name in enumerate(sorted(UNARY)):
        instructions += [
            (("unary", name), 0, 0),
            (("binary", "mul"), 0, 0),
            (("layer", names[i % len(names)]), 0, 0),
        ]
    rebuilt = 0
    for start in range(0, len(instructions), 12):
        spec = {
            "instructions": instructions[start : start + 12],
            "outputs": [3],
            "frozen": 0,
            "dtype": torch.float32,
            "input_grad": True,
            "columns_first": False,
        }
        before = execution_context.counters()[1]
        check(spec)
        rebuilt += execution_context.counters()[1] - before
    assert rebuilt > 30
