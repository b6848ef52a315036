from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.cost.devices import DEVICES, Device
from recoup.cost.model import FlopsCost
from recoup.cost.roofline import RooflineCost
from tests.cost.helpers import signature_of, trace_of

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


@given(
    name=st.sampled_from(sorted(DEVICES)),
    small=st.tuples(*[st.integers(1, 3000)] * 3),
    more=st.tuples(*[st.integers(0, 3000)] * 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
@settings(max_examples=60, deadline=None)
def test_larger_ops_never_take_less(
    name: str, small: tuple[int, int, int], more: tuple[int, int, int], dtype: torch.dtype
) -> None:
    cost = RooflineCost(DEVICES[name])

    def seconds(m: int, k: int, n: int) -> float:
        return cost.seconds(signature_of(aten.mm.default, meta(m, k, dtype=dtype), meta(k, n, dtype=dtype)))

    large = [a + b for a, b in zip(small, more)]
    assert 0 < seconds(*small) <= seconds(*large)


def test_bounds_are_the_devices_own() -> None:
    device = DEVICES["h100-sxm"]
    cost = RooflineCost(device)
    n = 8192
    big = signature_of(aten.mm.default, meta(n, n, dtype=torch.bfloat16), meta(n, n, dtype=torch.bfloat16))
    assert cost.seconds(big) == pytest.approx(2 * n**3 / (device.bf16_flops * device.matmul_fraction))
    copy = signature_of(aten.clone.default, meta(n, n))
    assert cost.seconds(copy) == pytest.approx(8 * n * n / (device.bandwidth_bytes * device.bandwidth_fraction))
    assert cost.seconds(signature_of(aten.relu.default, meta(4))) == device.launch_seconds
    assert cost.seconds(signature_of(aten.view.default, meta(4), [2, 2])) == 0


def test_float32_products_take_the_rate_that_torch_is_set_to() -> None:
    n, precision = 4096, torch.get_float32_matmul_precision()
    product = signature_of(aten.mm.default, meta(n, n), meta(n, n))
    image, kernel = meta(64, 256, 64, 64), meta(256, 256, 3, 3)
    convolution = signature_of(
        aten.convolution.default, image, kernel, None, [1] * 2, [1] * 2, [1] * 2, False, [0] * 2, 1
    )
    h100, t4 = DEVICES["h100-sxm"], DEVICES["t4"]

    def seconds(device: Device) -> tuple[float, float]:
        cost = RooflineCost(device)
        return cost.seconds(product), cost.seconds(convolution)

    plain = seconds(h100), seconds(t4)
    allowed = torch.backends.cudnn.conv.fp32_precision
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        rounded = seconds(h100), seconds(t4)
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.conv.fp32_precision = allowed
    assert plain[0][0] / rounded[0][0] == pytest.approx(h100.tf32_flops / h100.fp32_flops)
    assert rounded[0][1] / plain[0][1] == pytest.approx(
        h100.tf32_flops / h100.fp32_flops
    )  # convolutions: on by default
    assert plain[1] == rounded[1]


def test_prices_follow_the_ops() -> None:
    signatures = [
        signature_of(aten.relu.default, meta(1000, 1000)),
        signature_of(aten.mm.default, meta(9, 9), meta(9, 9)),
    ]
    trace = trace_of(signatures)
    for cost in (FlopsCost(), RooflineCost(DEVICES["a100-80gb"])):
        priced = cost.price(trace)
        assert priced.trace is trace and priced.is_estimate
        assert len(priced.op_seconds) == 2 and priced.op_workspace_bytes == (0, 0)
        assert priced == cost.price(trace)
    assert priced.source == "roofline of a100-80gb"
