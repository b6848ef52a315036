"""Every op kind under `rederive()`: gradients, strides of gradients and buffers bit for bit those of plain."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recoup
from recoup.runtime import execution_context

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
LARGE = (3, 6, 19, 23)  # 7866 elements: large enough to be worth rebuilding, with a tail after every vector width


@dataclasses.dataclass(frozen=True)
class Op:
    """`build(channels, dtype)` gives a module or function; `derives`: its output can be rebuilt from its input."""

    build: Callable[[int, torch.dtype], Callable[[Tensor], Tensor]]
    derives: bool = True


def fn(function: Callable[[Tensor], Tensor], *, derives: bool = True) -> Op:
    return Op(lambda channels, dtype: function, derives)


def layer(make: Callable[[int], nn.Module]) -> Op:
    return Op(lambda channels, dtype: make(channels).to(dtype))


class HandRMSNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(channels) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(1, -1)
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight * y.to(x.dtype)).movedim(-1, 1)


class OnLastDim(nn.Module):
    """Applies a module over the channels as the last dimension."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.movedim(1, -1)).movedim(-1, 1)


class Affine(nn.Module):
    """y = x * weight + bias with parameters: what ops with a second operand read."""

    def __init__(self, channels: int, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(channels, 1, 1) + 0.5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def with_weight(function: Callable[[Tensor, Tensor], Tensor]) -> Op:
    return Op(lambda channels, dtype: Affine(channels, function).to(dtype))


class NormReluInPlace(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x), inplace=True)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y += x
        return F.relu_(y)


def hand_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def glu(gate: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: gate(x) * (x - 0.25)


def glu_split(x: Tensor) -> Tensor:
    a, b = x.split(x.shape[1] // 2, dim=1)
    return F.silu(a) * b


def through(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.sigmoid(x.to(dtype)).to(x.dtype)


def masked(x: Tensor) -> Tensor:
    return x.masked_fill(x > 0.3, -2.0)


def causal(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[-2:], dtype=torch.bool).tril()
    return torch.softmax(x.masked_fill(~mask, torch.finfo(x.dtype).min), dim=-1)


OPS: dict[str, Op] = {
    "mul": with_weight(lambda x, w: x * w),
    "mul_scalar": fn(lambda x: x * 1.7),
    "mul_self": fn(lambda x: x * x),
    "add": with_weight(lambda x, w: x + w),
    "add_alpha": with_weight(lambda x, w: torch.add(x, w, alpha=3)),
    "sub": with_weight(lambda x, w: x - w),
    "rsub": fn(lambda x: 1 - x),
    "div": with_weight(lambda x, w: x / w),
    "div_under": with_weight(lambda x, w: w / (x.abs() + 1)),
    "neg": fn(lambda x: -x),
    "pow": fn(lambda x: x**3),
    "pow_float": fn(lambda x: (x.abs() + 0.1) ** 1.3),
    "pow_under": fn(lambda x: torch.pow(2.0, x)),
    "pow_tensor": with_weight(lambda x, w: torch.pow(x.abs() + 0.1, w)),
    "sqrt": fn(lambda x: (x.abs() + 0.1).sqrt()),
    "rsqrt": fn(lambda x: (x.abs() + 0.1).rsqrt()),
    "exp": fn(torch.exp),
    "log": fn(lambda x: (x.abs() + 0.1).log()),
    "sincos": fn(lambda x: x.sin() * x.cos()),
    "reciprocal": fn(lambda x: (x.abs() + 0.1).reciprocal()),
    "sigmoid": fn(torch.sigmoid),
    "tanh": fn(torch.tanh),
    "erf": fn(torch.erf),
    "relu": fn(F.relu),
    "relu_after_layer_norm_in_place": layer(lambda c: NormReluInPlace(OnLastDim(nn.LayerNorm(c)))),
    "relu_after_batch_norm_in_place": layer(lambda c: NormReluInPlace(nn.BatchNorm2d(c))),
    "residual_add_relu_in_place": layer(Residual),
    "in_place_chain": fn(lambda x: (x * 2).add_(1).mul_(0.5).exp_()),
    "in_place_sigmoid": fn(lambda x: (x * 2).sigmoid_()),
    "leaky_relu": fn(F.leaky_relu),
    "leaky_relu_in_place": fn(lambda x: F.leaky_relu_(x * 2, 0.2)),
    "elu": fn(lambda x: F.elu(x, 0.7)),
    "elu_in_place": fn(lambda x: F.elu(x * 2, 0.7, inplace=True)),
    "selu": fn(F.selu),
    "celu": fn(F.celu),
    "softplus": fn(lambda x: F.softplus(x, 2.0)),
    "clamp": fn(lambda x: x.clamp(-0.5, 0.4)),
    "clamp_min": fn(lambda x: x.clamp(min=0.1)),
    "hardtanh": fn(F.hardtanh),
    "relu6_in_place": fn(lambda x: F.relu6(x * 4, inplace=True)),
    "hardswish": fn(F.hardswish),
    "hardsigmoid": fn(F.hardsigmoid),
    "threshold": fn(lambda x: F.threshold(x, 0.2, 7.0)),
    "where": fn(lambda x: torch.where(x > 0, x * 2, x.exp())),
    "masked_fill": fn(masked),
    "minimum": with_weight(torch.minimum),
    "lerp": with_weight(lambda x, w: torch.lerp(x, x * 2, 0.3)),
    "addcmul": with_weight(lambda x, w: torch.addcmul(x, x, w, value=0.5)),
    "gelu": fn(F.gelu),
    "gelu_tanh": fn(lambda x: F.gelu(x, approximate="tanh")),
    "gelu_by_hand": fn(hand_gelu),
    "silu": fn(F.silu),
    "silu_in_place": fn(lambda x: F.silu(x * 2, inplace=True)),
    "swiglu": fn(glu(F.silu)),
    "geglu": fn(glu(F.gelu)),
    "swiglu_of_split": fn(glu_split),
    "glu": fn(lambda x: F.glu(x, dim=1), derives=False),
    "mish": fn(F.mish),
    "cast_down": fn(through(torch.bfloat16)),
    "cast_up": fn(through(torch.float64)),
    "cast_half": fn(through(torch.float16)),
    "dropout": fn(lambda x: F.dropout(x, 0.3)),
    "dropout_product": fn(lambda x: F.dropout(x, 0.3) * x),
    "dropout_in_place": fn(lambda x: F.dropout(x * 2, 0.3, inplace=True)),
    "dropout_2d": fn(lambda x: F.dropout2d(x, 0.3)),
    "alpha_dropout": fn(lambda x: F.alpha_dropout(x, 0.3, training=True)),
    "dropout_all": fn(lambda x: F.dropout(x, 1.0)),
    "dropout_none": fn(lambda x: F.dropout(x, 0.0)),
    "softmax": fn(lambda x: torch.softmax(x, dim=-1)),
    "softmax_dim1": fn(lambda x: torch.softmax(x, dim=1)),
    "softmax_in_fp32": fn(lambda x: torch.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype)),
    "softmax_causal": fn(causal),
    "log_softmax": fn(lambda x: torch.log_softmax(x, dim=1)),
    "layer_norm": layer(lambda c: OnLastDim(nn.LayerNorm(c))),
    "layer_norm_no_affine": layer(lambda c: OnLastDim(nn.LayerNorm(c, elementwise_affine=False))),
    "rms_norm": layer(lambda c: OnLastDim(nn.RMSNorm(c))),
    "rms_norm_by_hand": layer(HandRMSNorm),
    "group_norm": layer(lambda c: nn.GroupNorm(c // 2, c)),
    "instance_norm": layer(lambda c: nn.InstanceNorm2d(c, affine=True)),
    "instance_norm_tracked": layer(lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True)),
    "batch_norm": layer(nn.BatchNorm2d),
    "batch_norm_no_affine": layer(lambda c: nn.BatchNorm2d(c, affine=False)),
    "batch_norm_cumulative": layer(lambda c: nn.BatchNorm2d(c, momentum=None)),
    "batch_norm_untracked": layer(lambda c: nn.BatchNorm2d(c, track_running_stats=False)),
    "batch_norm_eval": layer(lambda c: nn.BatchNorm2d(c).eval()),
    "transpose": fn(lambda x: (x * 2).transpose(1, 3)),
    "transpose_contiguous": fn(lambda x: x.transpose(0, 2).contiguous()),
    "permute_reshape": fn(lambda x: x.permute(2, 0, 3, 1).reshape(x.shape[2], -1)),
    "flatten": fn(lambda x: (x + 1).flatten(1)),
    "expand": fn(lambda x: (x.mean(1, keepdim=True) + 1).expand(-1, 3, -1, -1), derives=False),
    "expand_add": fn(lambda x: x + x.mean((2, 3), keepdim=True).expand_as(x)),
    "contiguous": fn(lambda x: x.contiguous(memory_format=torch.channels_last)),
    "slice_step": fn(lambda x: (x * 2)[..., ::1]),
    "flip": fn(lambda x: x.flip(-1)),
    "roll": fn(lambda x: x.roll(2, -1)),
    "repeat": fn(lambda x: x.repeat(1, 2, 1, 1)),
    "pad": fn(lambda x: F.pad(x, (1, 2, 0, 1))),
    "cat": fn(lambda x: torch.cat([x, x * 2, x.tanh()], dim=1)),
    "cat_of_split": fn(lambda x: torch.cat(list(reversed((x * 3).split(2, dim=1))), dim=1)),
    "stack": fn(lambda x: torch.stack([x, x.exp()], dim=2)),
    "chunk_unequal": fn(lambda x: (x * 2).tensor_split(2, dim=-1)[1].sigmoid()),
    "unbind": fn(lambda x: torch.stack((x * 2).unbind(1), dim=1)),
    "overlapping_view": fn(lambda x: (x * 2).contiguous().view(-1).unfold(0, 4, 2).exp(), derives=False),
    "max_pool": fn(lambda x: F.max_pool2d(x, 2, stride=1, padding=1)),
    "avg_pool": fn(lambda x: F.avg_pool2d(x, 2, stride=1)),
    "upsample_nearest": fn(lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest")),
    "upsample_bilinear": fn(lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear")),
}
LAYOUTS = {
    "fp32": ["contiguous", "transposed", "channels_last", "expanded", "sliced", "odd", "zero"],
    "fp64": ["transposed", "sliced", "odd"],
    "bf16": ["contiguous", "channels_last", "expanded", "zero"],
}


def make_input(layout: str, dtype: torch.dtype, requires_grad: bool = True) -> tuple[Tensor, Tensor]:
    """Returns a leaf and the 4-d tensor (even channels) that the op is to see, which may be a view of it."""
    n, c, h, w = LARGE
    if layout == "transposed":
        leaf = torch.randn(n, c, w, h, dtype=dtype)
    elif layout == "expanded":
        leaf = torch.randn(n, 1, h, w, dtype=dtype)
    elif layout == "sliced":
        leaf = torch.randn(n + 1, c + 3, h, 2 * w + 1, dtype=dtype)
    elif layout == "odd":
        leaf = torch.randn(2, 2, 3, 5, dtype=dtype)
    elif layout == "zero":
        leaf = torch.randn(0, c, h, w, dtype=dtype)
    else:
        leaf = torch.randn(n, c, h, w, dtype=dtype)
    if layout == "channels_last":
        leaf = leaf.contiguous(memory_format=torch.channels_last)
    leaf.requires_grad_(requires_grad)
    if layout == "transposed":
        return leaf, leaf.transpose(2, 3)
    if layout == "expanded":
        return leaf, leaf.expand(n, c, h, w)
    if layout == "sliced":
        return leaf, leaf[1:, 2 : 2 + c, :, 1::2]
    return leaf, leaf


class Run:
    """One forward and backward of `op(x * first) * last`; `x` is kept, the rest can be rebuilt from it."""

    def __init__(self, op: Op, layout: str, dtype: torch.dtype, rederive: bool) -> None:
        torch.manual_seed(0)
        leaf, x = make_input(layout, dtype)
        first = nn.Parameter(torch.rand(x.shape[1], 1, 1, dtype=dtype) + 0.5)
        last = nn.Parameter(torch.rand((), dtype=dtype) + 0.5)
        body = op.build(x.shape[1], dtype)
        self.error: str | None = None
        before = execution_context.counters()[1]
        try:
            if rederive:
                with recoup.rederive():
                    y = body(x * first) * last
            else:
                y = body(x * first) * last
            loss = (y * torch.linspace(-1, 1, max(y.numel(), 1), dtype=y.dtype)[: y.numel()].view(y.shape)).sum()
            loss.backward()
        except (ValueError, RuntimeError, IndexError) as error:
            self.error = f"{type(error).__name__}: {error}"
            return
        self.rebuilt = execution_context.counters()[1] - before
        module = body if isinstance(body, nn.Module) else nn.Module()
        parameters = [leaf, first, last, *module.parameters()]
        self.tensors = [y.detach(), loss.detach(), *(p.grad for p in parameters), *module.buffers()]


def assert_same_bits(expected: list[Tensor | None], found: list[Tensor | None]) -> None:
    assert len(expected) == len(found)
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert (a is None) == (b is None), i
        if a is None or b is None:
            continue
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride(), i
        bits_a, bits_b = (t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b))
        assert torch.equal(bits_a, bits_b), f"tensor {i} differs"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_gradients_are_those_of_plain(name: str, dtype: str) -> None:
    for layout in LAYOUTS[dtype]:
        plain = Run(OPS[name], layout, DTYPES[dtype], False)
        mine = Run(OPS[name], layout, DTYPES[dtype], True)
        assert plain.error == mine.error, layout
        if plain.error is not None:
            continue
        assert plain.rebuilt == 0
        assert_same_bits(plain.tensors, mine.tensors)
        if OPS[name].derives and layout not in ("odd", "zero"):
            assert mine.rebuilt > 0, layout


@pytest.mark.parametrize("name", ["batch_norm", "batch_norm_cumulative", "instance_norm_tracked"])
def test_statistics_are_updated_once(name: str) -> None:
    torch.manual_seed(0)
    body = OPS[name].build(6, torch.float32)
    assert isinstance(body, nn.Module)
    x = torch.randn(LARGE, requires_grad=True)
    with recoup.rederive():
        y = F.relu(body(x * 2)) ** 2
    after_forward = {key: value.clone() for key, value in body.state_dict().items()}
    before = execution_context.counters()[1]
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert execution_context.counters()[1] > before
    assert_same_bits(list(after_forward.values()), list(body.state_dict().values()))
    if isinstance(body, nn.BatchNorm2d):
        assert int(after_forward["num_batches_tracked"]) == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm_by_hand", "gelu_by_hand", "swiglu", "mish", "dropout"])
def test_under_autocast(name: str, dtype: str) -> None:
    results = []
    for rederive in (False, True):
        torch.manual_seed(0)
        body = OPS[name].build(8, torch.float32)
        mix = nn.Conv2d(6, 8, 1)
        out = nn.Conv2d(8, 4, 1)
        x = torch.randn(LARGE, requires_grad=True)
        modules = nn.ModuleList([m for m in (mix, out, body) if isinstance(m, nn.Module)])
        before = execution_context.counters()[1]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            if rederive:
                with recoup.rederive():
                    y = out(body(mix(x)))
            else:
                y = out(body(mix(x)))
        (y.float() ** 2).mean().backward()
        if rederive:
            assert execution_context.counters()[1] > before
        results.append([y.detach(), x.grad, *(p.grad for p in modules.parameters())])
    assert_same_bits(*results)


def test_one_node_with_several_outputs() -> None:
    """GroupNorm's mean and rstd come from the node of its output: none may stand in for another."""
    grads = []
    for rederive in (False, True):
        torch.manual_seed(0)
        x = torch.randn(64, 64, 3, requires_grad=True)
        weight, bias = torch.rand(64), torch.rand(64)

        def run(x: Tensor = x, weight: Tensor = weight, bias: Tensor = bias) -> Tensor:
            y, mean, _ = torch.native_group_norm(x * 2, weight, bias, 64, 64, 3, 64, 1e-5)
            return (y.exp().sum() + mean.exp().sum()) if not mean.requires_grad else (y * y).sum() + mean.sum()

        if rederive:
            with recoup.rederive():
                loss = run()
        else:
            loss = run()
        loss.backward()
        grads.append([x.grad])
    assert_same_bits(*grads)
