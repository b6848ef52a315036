"""Kept results of fake ops: the trace is the same with them and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recoup import _torch
from recoup.capture.capture import capture
from recoup.capture.op_cache import _NEVER, Answers, FakeResults, _is_same
from recoup.capture.spec import StepSpec
from recoup.capture.step import Objective
from tests.models import KINDS, make


def _forgetful(self: FakeResults, func: Any, args: Any, kwargs: Any) -> Any:
    self.key = None
    return func(*args, **kwargs)


def _both(spec: StepSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = capture(spec)
    with monkeypatch.context() as patched:
        patched.setattr(FakeResults, "run", _forgetful)
        made = capture(spec)
    assert made.source == "fake"
    assert kept == made


@pytest.mark.parametrize("kind", KINDS)
def test_traces_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, loss = make(kind)
    _both(StepSpec(model=model, batch=batch, objective=Objective(loss=loss), optimizer=torch.optim.AdamW), monkeypatch)


class _Odd(nn.Module):
    """Views at offsets, in-place changes, memory formats, promotion, several results, random numbers, constants."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(())
        for step in range(3):
            a, b = self.lin(x)[:, step : step + 3].split([1, 2], dim=1)
            y = self.drop(b.transpose(0, 1).contiguous()).add_(1).mul(2 + step)
            y = y + a.reshape(-1).double()[: y.shape[1]].to(y.dtype)
            image = x.view(2, 2, 3, -1)[:, :, :, : step + 1].to(memory_format=torch.channels_last)
            z = self.norm(self.conv(image)).relu_()
            values, indices = z.flatten(1).topk(2)
            long = torch.gather(z.flatten(1), 1, indices) * torch.tensor(3.0)
            total = total + (y.sum() + values.mean() + long.sum() * self.scale) / (step + 1)
            total = total + torch.var_mean(z, dim=(0, 2))[0].sum() + torch.cat([a, b], 1).chunk(3, 1)[1].sum()
        return total


def test_odd_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    _both(StepSpec(model=_Odd(), batch=torch.randn(8, 6)), monkeypatch)


def test_views_begin_where_their_base_does() -> None:
    mode, aten = _torch.fake_tensor_mode(), torch.ops.aten
    results = FakeResults(mode)
    with mode:
        base = torch.empty(10, 4)
    for begin in (2, 5, 2):
        part = results.run(aten.slice.Tensor, (base, 0, begin, begin + 3), {})
        row = results.run(aten.select.int, (part, 0, 1), {})
        assert (part.storage_offset(), row.storage_offset()) == (4 * begin, 4 * begin + 4)
        assert row.untyped_storage() is base.untyped_storage()
    fresh = [results.run(aten.relu.default, (base,), {}) for _ in range(2)]
    assert len({t.untyped_storage()._cdata for t in (base, *fresh)}) == 3
    assert results.run(aten.relu_.default, (base,), {}) is base
    assert results.run(aten.relu_.default, (base,), {}) is base


def test_arguments_that_look_alike_are_told_apart() -> None:
    mode, aten = _torch.fake_tensor_mode(), torch.ops.aten
    results = FakeResults(mode)
    with mode:
        whole = torch.empty(3, dtype=torch.int64)
    assert results.run(aten.mul.Tensor, (whole, 1), {}).dtype is torch.int64
    assert results.run(aten.mul.Tensor, (whole, 1.0), {}).dtype is torch.float32
    assert results.run(aten.mul.Tensor, (whole, True), {}).dtype is torch.int64
    torch.set_default_dtype(torch.float64)
    try:
        assert results.run(aten.mul.Tensor, (whole, 1.0), {}).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_each_distinct_op_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of 200 steps asks fake tensors no more often than one of 20."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x.new_zeros(x.shape[1], 5)
            for frame in x:
                h = self.cell(frame, h)
            return h.sum()

    made: list[int] = []
    run = FakeResults.run

    def counted(self: FakeResults, func: Any, args: Any, kwargs: Any) -> Any:
        known = len(self._kept)
        out = run(self, func, args, kwargs)
        made[-1] += self.key is None or len(self._kept) > known
        return out

    monkeypatch.setattr(FakeResults, "run", counted)
    for num_steps in (20, 200):
        made.append(0)
        capture(StepSpec(model=Loop(), batch=torch.randn(num_steps, 3, 4)))
    assert 0 < made[1] <= made[0] + 200  # one `as_strided` a step, whose arguments differ


def test_strided_views_and_attention_are_answered_from_what_is_kept() -> None:
    mode, aten = _torch.fake_tensor_mode(), torch.ops.aten
    results = FakeResults(mode)
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    with mode:
        large = torch.empty(10, 4)
        query = torch.empty(1, 2, 8, 4)
        first = results.run(flash, (query, query, query), {})
        strided = results.run(aten.as_strided.default, (large, (2, 2), (4, 1), 8), {})
        again = results.run(aten.as_strided.default, (large, (2, 2), (4, 1), 8), {})
        wide = torch.empty(20, 4)[::2].t().t()
        other = results.run(aten.as_strided.default, (wide, (2, 2), (4, 1), 8), {})
        behind = results.run(aten.as_strided.default, (large[1:], (2, 2), (4, 1), 8), {})
    for view in (strided, again, behind):
        assert view.storage_offset() == 8
        assert view.untyped_storage() is large.untyped_storage()
    assert other.untyped_storage() is wide.untyped_storage()
    assert [t.shape for t in first] == [t.shape for t in results.run(flash, (query, query, query), {})]


def test_plain_numbers_among_results_are_kept() -> None:
    mode = _torch.fake_tensor_mode()
    kept = Answers()
    results = FakeResults(mode, kernels={torch.ops.aten.var_mean.correction: lambda x: (x.sum(), 7)}, kept=kept)
    with mode:
        x = torch.empty(3)
    for _ in range(2):
        total, number = results.run(torch.ops.aten.var_mean.correction, (x,), {})
        assert number == 7
        assert total.shape == ()
    assert all(type(recipe) is tuple for recipe in kept.recipes.values())


_aten = torch.ops.aten


def _on_meta(dtype: torch.dtype, memory_format: torch.memory_format) -> list[tuple[Any, tuple[Any, ...]]]:
    """Calls of ops that a fake mode answers by decomposing them, or by their own kernel for metadata."""
    x = torch.empty(2, 8, 4, 6, dtype=dtype, memory_format=memory_format)
    weight, statistic, groups = torch.empty(8), torch.empty(8), torch.empty(2, 4)
    rows, target = torch.empty(4, 6, dtype=dtype), torch.empty(4, dtype=torch.int64)
    return [
        (_aten.native_group_norm_backward.default, (x, x, groups, groups, weight, 2, 8, 24, 4, [True, True, False])),
        (_aten.native_batch_norm_backward.default, (x, x, weight, *[statistic] * 4, True, 1e-5, [True, True, True])),
        (_aten.silu_backward.default, (x, x)),
        (_aten.gelu_backward.default, (x, x)),
        (_aten.sigmoid_backward.default, (x.transpose(1, 2), x.transpose(1, 2))),
        (_aten._log_softmax_backward_data.default, (rows, rows, 1, dtype)),
        (_aten.nll_loss_forward.default, (rows, target, None, 1, -100)),
        (_aten.mul.Tensor, (x, x[:1])),
        (_aten.add.Tensor, (x.transpose(1, 2)[..., ::2], target.view(1, 4, 1, 1))),
        (_aten.eq.Scalar, (x, 1)),
        (_aten.relu.default, (x[:, 1:],)),
        (_aten.detach.default, (x[:, 1:],)),
        (_aten.view.default, (rows[1:], [2, -1])),
        (_aten.split.Tensor, (x, 3, 1)),
        (_aten.slice.Tensor, (x, 3, 1, 6, 2)),
        (_aten.as_strided.default, (x, [4, 2], [2, 1], 3)),
        (_aten.view.dtype, (rows, torch.int16)),
    ]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_on_the_meta_device_are_those_of_the_mode(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    mode = _torch.fake_tensor_mode()
    with mode:
        calls = _on_meta(dtype, memory_format)
    for func, args in calls:
        found = _torch.answered_on_meta(func, args, {}, mode, is_view=func.is_view)
        with mode:
            wanted = func(*args)
        assert found is not None, func
        assert type(found) is type(wanted), func
        for one, other in zip(*((r if isinstance(r, (tuple, list)) else (r,)) for r in (found, wanted)), strict=True):
            assert (one is None) is (other is None), func
            if one is None:
                continue
            assert _is_same(one, other), func
            if func.is_view:
                assert one.untyped_storage() is other.untyped_storage() is args[0].untyped_storage(), func


def test_what_the_meta_device_cannot_tell_is_left_to_the_mode() -> None:
    mode = _torch.fake_tensor_mode()
    with mode:
        x, none = torch.empty(2, 8, 4, 6), torch.empty(5, 0, 0).expand(5, 0, 0)
    for func, args in [
        (_aten._to_copy.default, (x,)),
        (_aten.view.default, (none, [5, 0, 0])),  # its strides are the mode's own
        (_aten.expand_as.default, (x[:1], x)),  # of two tensors
        (_aten.silu_backward.default, (x, torch.empty(2, 8, 4, 6))),  # a real tensor
    ]:
        assert _torch.answered_on_meta(func, args, {}, mode, is_view=func.is_view) is None, func


def test_ops_that_depend_on_the_device_are_asked_there_once_for_each_form() -> None:
    mode, norm = _torch.fake_tensor_mode(), _aten.native_batch_norm.default
    kept = Answers()
    results = FakeResults(mode, kept=kept)
    with mode:
        sizes = [(2, 8, 4, 6), (2, 16, 4, 6), (3, 4, 8, 8)]
        calls = [(torch.empty(size), *[torch.empty(size[1])] * 4) for size in sizes]
        for is_training in (True, False):
            for args in calls:
                call = (*args, is_training, 0.1, 1e-5)
                found = results.run(norm, call, {})
                assert _is_same(found, norm(*call)), call
    assert sorted(kept.alike.values()) == [False, True], "in evaluation a CPU's has no statistics among its results"


def test_parts_of_a_tensor_that_say_nothing_of_it_are_kept() -> None:
    mode = _torch.fake_tensor_mode()
    results = FakeResults(mode)
    with mode:
        base = torch.empty(10, 6)
    for first in (base, base[2:8]):
        for _ in range(2):
            parts = results.run(_aten.unsafe_split.Tensor, (first, 2, 1), {})
            assert [p.storage_offset() - first.storage_offset() for p in parts] == [0, 2, 4]
            assert all(p.untyped_storage()._cdata == base.untyped_storage()._cdata for p in parts)
    assert not any(recipe is _NEVER for recipe in results._kept.values())
