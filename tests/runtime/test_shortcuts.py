"""What is rebuilt for less than it cost the first time has the same bits, layouts and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.runtime.rebuild import shortcuts
from recoup.runtime.rebuild.cheap_ops import op_facts
from recoup.runtime.rebuild.values import geometry_of

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "volume", "rows"])
def test_batch_norm_from_its_statistics(layout: str, affine: bool, dtype: torch.dtype) -> None:
    shape = {"volume": (2, 37, 3, 5, 4), "rows": (50, 37)}.get(layout, (3, 37, 5, 7))
    x = torch.randn(shape, dtype=dtype) * 7 + 3
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    weight, bias = (torch.rand(37, dtype=dtype), torch.randn(37, dtype=dtype)) if affine else (None, None)
    for eps in (1e-5, 1e-3, 1e-12):
        out, mean, rstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, eps)
        again = shortcuts.batch_norm_applied((x, weight, bias), mean, rstd)
        assert again is not None
        assert torch.equal(out, again)
        assert out.stride() == again.stride()


def test_batch_norm_of_other_layouts_is_left_to_the_op() -> None:
    x = torch.randn(3, 8, 6, 6)[:, :, ::2]
    _, mean, rstd = torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    assert shortcuts.batch_norm_applied((x, None, None), mean, rstd) is None


@pytest.mark.parametrize("shape", [(2, 3, 9, 11), (3, 9, 11), (2, 3, 5, 6, 7)])
def test_max_pooling_from_its_indices(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    x.view(-1)[5] = float("nan")
    pool = F.max_pool3d if len(shape) == 5 else F.max_pool2d
    out, indices = pool(x, 3, stride=2, padding=1, return_indices=True)
    again = shortcuts.max_pool_gathered(x, indices, 3 if len(shape) == 5 else 2)
    assert again is not None
    assert torch.equal(out.nan_to_num(7.5), again.nan_to_num(7.5))


def test_over_a_spare_argument_only() -> None:
    a, b = torch.randn(5, 4), torch.randn(5, 4)
    expected = a + b

    def over(op: Any, args: list[Any], kwargs: dict[str, Any], spare: list[torch.Tensor]) -> Any:
        return shortcuts.call_over(op_facts(op), args, kwargs, spare=spare, result=geometry_of(a))

    assert over(aten.add.Tensor, [a, b], {}, []) is None
    assert over(aten.add.Tensor, [a, b[:1]], {}, [a]) is None  # a smaller operand: leave it to the op
    assert over(aten.add.Tensor, [a, b], {"alpha": 2}, [b]) is None  # a + 2 * b, not 2 * a + b
    assert over(aten.sub.Tensor, [a, b], {}, [b]) is None
    out = over(aten.add.Tensor, [a, b], {}, [b])
    assert out is b
    assert torch.equal(out, expected)


def test_a_result_of_another_dtype_is_not_written_over_its_argument() -> None:
    parameter = nn.Parameter(torch.randn(64, 64))

    def loss() -> torch.Tensor:
        return (torch.tanh(parameter) * ((parameter > 0).to(torch.int32) * 0.5)).sum()

    (plain,) = torch.autograd.grad(loss(), parameter)
    with recoup.rederive():
        mine = loss()
    assert torch.equal(plain, torch.autograd.grad(mine, parameter)[0])


def test_an_intermediate_that_an_outer_op_has_read_is_not_overwritten() -> None:
    layer = nn.LayerNorm(64)
    x = torch.randn(64, 64)

    def step() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer.zero_grad()
        y = layer(x)
        torch.stack([y, F.dropout(y, 0.5)]).amax(0).sum().backward()
        return [p.grad.clone() for p in layer.parameters() if p.grad is not None]

    plain = step()
    with recoup.rederive():
        mine = step()
    assert all(torch.equal(a, b) for a, b in zip(plain, mine, strict=True))


def test_indices_are_kept_in_four_bytes() -> None:
    x = torch.randn(4, 8, 32, 32, requires_grad=True)
    kept: list[int] = []

    class Watch:
        def saved(self, tensor: torch.Tensor) -> None:
            kept.append(tensor.numel() * tensor.dtype.itemsize)

        def rederived(self, tensor: torch.Tensor, sources: list[torch.Tensor]) -> None:
            pass

    from recoup.runtime import execution_context

    with execution_context.observing(Watch()), recoup.rederive():
        loss = F.max_pool2d(F.relu(x), 2).square().sum()
    assert 4 * 8 * 16 * 16 * 4 in kept
    assert 4 * 8 * 16 * 16 * 8 not in kept
    loss.backward()
    expected = torch.autograd.grad(F.max_pool2d(F.relu(x), 2).square().sum(), x)[0]
    assert torch.equal(x.grad, expected)
