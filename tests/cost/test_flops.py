from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import flop_registry

from recoup.cost.flops import kind, op_name
from tests.cost.helpers import signature_of

aten = torch.ops.aten
size = st.integers(1, 7)


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def torch_flops(func: Any, *args: Any) -> int:
    return flop_registry[func.overloadpacket](*args, out_val=func(*args))


@given(m=size, k=size, n=size, b=size)
@settings(max_examples=30, deadline=None)
def test_matmuls_as_torch_counts(m: int, k: int, n: int, b: int) -> None:
    cases: list[tuple[Any, ...]] = [
        (aten.mm.default, meta(m, k), meta(k, n)),
        (aten.addmm.default, meta(n), meta(m, k), meta(k, n)),
        (aten.bmm.default, meta(b, m, k), meta(b, k, n)),
        (aten.baddbmm.default, meta(b, m, n), meta(b, m, k), meta(b, k, n)),
    ]
    for func, *args in cases:
        assert signature_of(func, *args).flops == torch_flops(func, *args)


@given(
    batch=size,
    channels=st.sampled_from([(2, 4), (4, 2), (3, 3)]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 1),
    dims=st.integers(1, 3),
    transposed=st.booleans(),
    mask=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@settings(max_examples=60, deadline=None)
def test_convolutions_as_torch_counts(
    batch: int,
    channels: tuple[int, int],
    kernel: int,
    stride: int,
    padding: int,
    dims: int,
    transposed: bool,
    mask: tuple[bool, bool, bool],
) -> None:
    inputs, outputs = channels
    x = meta(batch, inputs, *(6 + i for i in range(dims)))
    weight = meta(*((inputs, outputs) if transposed else (outputs, inputs)), *[kernel] * dims)
    settings_ = ([stride] * dims, [padding] * dims, [1] * dims, transposed, [0] * dims, 1)
    args = (x, weight, None, *settings_)
    assert signature_of(aten.convolution.default, *args).flops == torch_flops(aten.convolution.default, *args)

    grad = torch.empty_like(aten.convolution.default(*args))
    args = (grad, x, weight, [outputs], *settings_, list(mask))
    func = aten.convolution_backward.default
    assert signature_of(func, *args).flops == torch_flops(func, *args)


def test_groups_cost_what_they_multiply() -> None:
    x, weight = meta(2, 8, 6, 6), meta(8, 2, 3, 3)
    shared = ([1, 1], [1, 1], [1, 1], False, [0, 0], 4)
    forward = signature_of(aten.convolution.default, x, weight, None, *shared).flops
    assert forward == 2 * weight.numel() * 2 * 36
    grad = meta(2, 8, 6, 6)
    func = aten.convolution_backward.default
    assert signature_of(func, grad, x, weight, [8], *shared, [True, True, True]).flops == 2 * forward
    assert signature_of(func, grad, x, weight, [8], *shared, [False, True, True]).flops == forward
    assert signature_of(func, grad, x, weight, [8], *shared, [False, False, True]).flops == 0


@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_as_torch_counts(key_heads: int) -> None:
    b, h, q, k, d = 2, 4, 8, 16, 8
    query, key, value = torch.rand(b, h, q, d), torch.rand(b, key_heads, k, d), torch.rand(b, key_heads, k, d)
    whole = [t.repeat_interleave(h // key_heads, dim=1) for t in (key, value)]  # torch 2.11 counts no grouped queries
    expected = flop_registry[aten._scaled_dot_product_flash_attention](query, *whole, out_val=query)
    backward = flop_registry[aten._scaled_dot_product_flash_attention_backward](query, query, *whole, out_val=query)
    if key_heads == h:
        func = aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = func(query, key, value)
        assert signature_of(func, query, key, value).flops == expected
        func = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        assert signature_of(func, out, query, key, value, out, lse, 0.0, False).flops == backward
    from recoup.cost.flops import count_flops
    from recoup.ir.trace import TensorSpec

    def spec(t: torch.Tensor) -> TensorSpec:
        return TensorSpec(shape=tuple(t.shape), stride=tuple(t.stride()), dtype="float32")

    qkv = (spec(query), spec(key), spec(value))
    for which in ("flash", "efficient", "cudnn"):
        name = f"aten._scaled_dot_product_{which}_attention"
        assert count_flops(f"{name}.default", (*qkv, None), {}, ()) == expected
        assert count_flops(f"{name}_backward.default", (spec(query), *qkv, None), {}, ()) == backward
    # The packed layout has heads and lengths the other way round.
    packed = tuple(spec(t.transpose(1, 2)) for t in (query, key, value))
    name = "aten._flash_attention_forward.default"
    assert count_flops(name, (*packed, None, None, q, k, 0.0, False, False), {}, ()) == expected
    offsets = TensorSpec(shape=(b + 1,), stride=(1,), dtype="int32")
    flat = tuple(TensorSpec(shape=(t.shape[0] * t.shape[2], *t.shape[1::2]), stride=(1, 1, 1), dtype="float32")
                 for t in (query, key, value))  # fmt: skip
    assert count_flops(name, (*flat, offsets, offsets, q, k, 0.0, False, False), {}, ()) == expected


def test_other_ops_count_elements() -> None:
    x = torch.rand(3, 5)
    assert signature_of(aten.add.Tensor, x, x).flops == 15
    assert signature_of(aten.sum.default, x).flops == 15
    assert signature_of(aten.native_layer_norm.default, x, [5], None, None, 1e-5).flops == 15
    assert signature_of(aten._foreach_add.List, [x, x], [x, x]).flops == 30
    assert signature_of(aten.clone.default, x).flops == 0
    assert signature_of(aten.transpose.int, x, 0, 1).flops == 0
    assert signature_of(aten.embedding.default, torch.rand(99, 4), torch.zeros(2, dtype=torch.long)).flops == 0


def test_kinds() -> None:
    assert op_name("aten.add_.Tensor") == "add"
    assert op_name("aten._unsafe_view.default") == "_unsafe_view"
    expected = {
        "aten.mm.default": "matmul",
        "aten.addmm_.default": "matmul",
        "aten.bmm.dtype": "matmul",
        "aten._addmm_activation.default": "matmul",
        "aten.mkldnn_rnn_layer_backward.default": "matmul",
        "aten.convolution.default": "convolution",
        "aten.convolution_backward.default": "convolution",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": "attention",
        "aten._efficient_attention_backward.default": "attention",
        "aten.gelu.default": "other",
        "aten.native_layer_norm_backward.default": "other",
    }
    assert {name: kind(name) for name in expected} == expected


def test_heavy_ops_of_torch_are_heavy_here() -> None:
    for target in flop_registry:
        name = str(target)
        if name.startswith("aten."):
            assert kind(f"{name}.default") != "other", name
