"""The peak of an op run alone is its outputs plus its workspace, and so the peak of a step is that of its ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recoup.cost.measured import MeasuredCost
from recoup.cost.op_replay import make_call
from recoup.thresholds import SMALL_BYTES
from tests.cost.helpers import measured_peak_bytes, record, signature_of, trace_of

aten = torch.ops.aten
CPU = torch.device("cpu")
ONES, PADS = [1, 1], [1, 1]


def _ops() -> dict[str, Callable[[], Any]]:
    def conv(dims: int) -> Any:
        x, w = torch.rand(2, 16, *[12] * dims), torch.rand(16, 16, *[3] * dims)
        one = [1] * dims
        return aten.convolution_backward.default, (x, x, w, [16], one, one, one, False, [0] * dims, 1, [True] * 3)

    x, tokens = torch.rand(64, 512), torch.zeros(64, dtype=torch.long)
    norm = (x, x, [512], torch.rand(64, 1), torch.rand(64, 1) + 1, torch.rand(512), torch.rand(512), [True] * 3)
    image, w = torch.rand(2, 16, 24, 24), torch.rand(16, 16, 3, 3)
    return {
        "conv2d": lambda: (aten.convolution.default, (image, w, None, ONES, PADS, ONES, False, [0, 0], 1)),
        "conv2d backward": lambda: conv(2),
        "conv3d backward": lambda: conv(3),
        "linear backward": lambda: (aten.mm.default, (x.t(), x)),
        "layer norm backward": lambda: (aten.native_layer_norm_backward.default, norm),
        "softmax backward": lambda: (aten._softmax_backward_data.default, (x, x, -1, torch.float32)),
        "embedding backward": lambda: (aten.embedding_dense_backward.default, (x, tokens, 1000, -1, False)),
        "cross-entropy": lambda: (aten.nll_loss_forward.default, (x, tokens, None, 1, -100)),
        "cross-entropy backward": lambda: (
            aten.nll_loss_backward.default,
            (torch.rand(()), x, tokens, None, 1, -100, torch.rand(())),
        ),
        "mse loss": lambda: (aten.mse_loss.default, (x, x)),
        "mse loss of 64 KiB": lambda: (aten.mse_loss.default, (x[:32], x[:32])),
        "cross-entropy of probabilities": lambda: (aten.binary_cross_entropy.default, (x, x)),
        "coin tosses": lambda: (aten.bernoulli.default, (x,)),
    }


@pytest.mark.parametrize("name", _ops())
def test_peak_alone_is_outputs_plus_workspace(name: str) -> None:
    func, args = _ops()[name]()
    signature = signature_of(func, *args)
    cost = MeasuredCost(CPU, cache=False)
    cost.price(trace_of([signature]))
    found = cost.measurement(signature)
    call = make_call(signature, CPU)
    assert call is not None
    call()
    peak, left = measured_peak_bytes(call)
    if found is None:  # it moves too little to be measured, and must then hold no more than that
        assert peak < SMALL_BYTES
        return
    assert peak == left + found.workspace_bytes
    assert left == signature.output_bytes + found.extra_output_bytes
    if name == "conv3d backward":
        assert found.workspace_bytes > 0


def test_an_op_that_copies_a_whole_storage_copies_that_of_its_argument_alone() -> None:
    x, part = torch.rand(64, 512), torch.rand(64, 256)
    args = aten.slice_scatter.default, x, part, 1, 0, 256
    signature = signature_of(*args)
    cost = MeasuredCost(CPU, cache=False)
    cost.price(trace_of([signature]))
    found = cost.measurement(signature)
    _, left = measured_peak_bytes(lambda: aten.slice_scatter(x, part, 1, 0, 256))
    assert found is not None and found.extra_output_bytes == left - signature.output_bytes == 0


class _Conv(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip


class _MLP(nn.Sequential):
    def __init__(self) -> None:
        blocks = [[nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU(), nn.Dropout(0.1)] for _ in range(4)]
        super().__init__(*[layer for block in blocks for layer in block], nn.Linear(512, 10))


@pytest.mark.parametrize(("make", "batch"), [(_Conv, (8, 3, 32, 32)), (_MLP, (512, 512))], ids=["conv", "mlp"])
def test_step_peaks_where_its_ops_say(make: type[nn.Module], batch: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x, target = make(), torch.rand(batch), torch.randint(0, 10, batch[:1])

    def step() -> None:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), target).backward()

    step()
    model.zero_grad(set_to_none=True)
    signatures, levels = record(step)
    priced = MeasuredCost(CPU, cache=False).price(trace_of(signatures))
    predicted = max(level + extra for level, extra in zip(levels, priced.op_workspace_bytes))
    model.zero_grad(set_to_none=True)
    actual, _ = measured_peak_bytes(step)
    assert predicted == pytest.approx(actual, rel=0.01)
