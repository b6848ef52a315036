"""Ops that run again are called by the function of torch's API that has their name, if that is the very same op."""

from __future__ import annotations

import pytest
import torch

from recoup import _torch
from recoup.runtime.rebuild import op_function
from recoup.runtime.rebuild.op_function import OpFunction

aten = torch.ops.aten
x, y, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
CASES = {
    "binary": (aten.mul.Tensor, (x, y), {}),
    "scalar": (aten.mul.Tensor, (x, 0.5), {}),
    "keyword": (aten.add.Tensor, (x, y), {"alpha": 2}),
    "string": (aten.gelu.default, (x,), {"approximate": "tanh"}),
    "list": (aten.native_layer_norm.default, (x, [8], weight, weight, 1e-5), {}),
    "tensors in a list": (aten.cat.default, ([x, y], 1), {}),
    "layout": (aten.clone.default, (x.t(),), {"memory_format": torch.contiguous_format}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_function_of_the_same_name_gives_the_same_bits(case: str) -> None:
    op, args, kwargs = CASES[case]
    runs = OpFunction(op)
    with _torch.below_autocast_and_autograd():
        first = runs.call(*args, **kwargs)
        assert runs.call in _torch.functions_named(op)
        again = runs.call(*args, **kwargs)
    wanted = op(*args, **kwargs)
    for found in (first, again):
        for one, other in zip(*(out if isinstance(out, tuple) else (out,) for out in (found, wanted)), strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()


def test_an_op_in_place_is_done_once() -> None:
    tensor = torch.ones(3)
    runs = OpFunction(aten.mul_.Tensor)
    assert runs.call(tensor, 2.0) is tensor
    assert tensor.tolist() == [2.0] * 3
    assert runs.call is torch.Tensor.mul_
    assert runs.call(tensor, 2.0).tolist() == [4.0] * 3


@pytest.mark.parametrize("wrong", ["another op", "more ops", "other arguments", "another result", "more results"])
def test_a_function_that_does_anything_else_is_not_taken(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {
        "another op": lambda tensor, other: tensor.add_(other),
        "more ops": lambda tensor, other: tensor.mul_(other).add_(1),
        "other arguments": lambda tensor, other: tensor.mul_(2 * other),
        "another result": lambda tensor, other: (tensor.mul_(other), 1)[1],
        "more results": lambda tensor, other: (tensor.mul_(other), tensor),
    }
    monkeypatch.setattr(op_function._torch, "functions_named", lambda op: 2 * [functions[wrong]])
    tensor = torch.ones(3)
    runs = OpFunction(aten.mul_.Tensor)
    assert runs.call(tensor, 2.0) is tensor
    assert tensor.tolist() == [2.0] * 3
    assert runs.call is _torch.op_call(aten.mul_.Tensor)


def test_an_op_may_come_twice_where_it_is_first_called() -> None:
    call = OpFunction(aten.mul.Tensor).call
    assert torch.equal(call(x, y), call(x, y))


def test_an_error_of_the_op_is_the_op_s() -> None:
    runs = OpFunction(aten.mm.default)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        runs.call(x, y)


def test_an_exception_of_the_user_s_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(tensor: torch.Tensor, other: float) -> None:
        tensor.mul_(other)
        raise TimeoutError  # by a handler of signals

    monkeypatch.setattr(op_function._torch, "functions_named", lambda op: [interrupted])
    runs = OpFunction(aten.mul_.Tensor)
    with pytest.raises(TimeoutError):
        runs.call(torch.ones(3), 2.0)
    assert runs.call(torch.ones(3), 2.0).tolist() == [2.0] * 3


def test_what_has_no_function_runs_as_it_is() -> None:
    runs = OpFunction(aten._to_copy.default)
    assert runs.call(x, dtype=torch.bfloat16).dtype is torch.bfloat16
    assert runs.call is _torch.op_call(aten._to_copy.default)


def test_a_function_in_the_place_of_an_op_runs_as_it_is() -> None:
    assert OpFunction(max).call(1, 2) == 2
