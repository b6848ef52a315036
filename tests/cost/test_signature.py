from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from recoup import _torch
from recoup.cost.op_replay import make_call
from recoup.cost.signature import make_signature, signature_key
from recoup.ir.trace import Signature, TensorSpec
from tests.cost.helpers import signature_of, tensors

aten = torch.ops.aten
CPU = torch.device("cpu")


def cases() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    x, y = torch.rand(4, 6), torch.rand(6, 4)
    image, weight = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last), torch.rand(4, 3, 3, 3)
    query = torch.rand(2, 2, 8, 4).transpose(1, 2).contiguous().transpose(1, 2)
    return [
        (aten.mm.default, (x, y), {}),
        (aten.addmm.default, (torch.rand(4), x, y), {}),
        (aten.mm.default, (y.t(), y), {}),
        (aten.add.Tensor, (x, torch.rand(1, 6).expand(4, 6)), {"alpha": 2}),
        (aten.mul_.Tensor, (x.clone(), 0.5), {}),
        (aten._to_copy.default, (x,), {"dtype": torch.bfloat16}),
        (aten.full.default, ([3, 4], 1.5), {"dtype": torch.float32, "device": CPU, "pin_memory": False}),
        (aten.clone.default, (image,), {"memory_format": torch.preserve_format}),
        (aten.convolution.default, (image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), {}),
        (aten.native_layer_norm.default, (x, [6], torch.ones(6), None, 1e-5), {}),
        (aten.masked_fill.Scalar, (x, x > 0.5, float("-inf")), {}),
        (aten.embedding.default, (x, torch.zeros(7, dtype=torch.long)), {}),
        (aten.embedding_dense_backward.default, (torch.rand(7, 6), torch.zeros(7, dtype=torch.long), 4, -1, False), {}),
        (aten.gather.default, (x, 1, torch.zeros(4, 1, dtype=torch.long)), {}),
        (aten.nll_loss_forward.default, (x, torch.zeros(4, dtype=torch.long), None, 1, -100), {}),
        (aten.native_dropout.default, (x, 0.1, True), {}),
        (aten.bernoulli_.float, (torch.empty(4, 6), 0.9), {"generator": torch.Generator()}),
        (aten.cat.default, ([x, x], 1), {}),
        (aten._foreach_mul_.Scalar, ([x.clone(), y.clone()], 0.9), {}),
        (aten.index.Tensor, (x, [None, torch.zeros(2, dtype=torch.long)]), {}),
        (aten.gelu.default, (x,), {"approximate": "tanh"}),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (query, query, query, 0.0, True), {}),
        (aten.split.Tensor, (x, 2, 1), {}),
    ]


def from_json(data: dict[str, Any]) -> Signature:
    def nest(item: Any) -> Any:
        if isinstance(item, dict):
            return TensorSpec(shape=tuple(item["shape"]), stride=tuple(item["stride"]), dtype=item["dtype"])
        return tuple(nest(i) for i in item) if isinstance(item, list) else item

    return Signature(**{**data, "args": nest(data["args"]), "kwargs": nest(data["kwargs"])})


def layout(nest: Any) -> list[Any]:
    return [(t.shape, t.stride(), t.dtype) for t in tensors(nest)]


@pytest.mark.parametrize("case", cases(), ids=lambda case: str(case[0]))
def test_round_trip_through_json_and_run(case: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> None:
    func, args, kwargs = case
    expected = func(*args, **kwargs)
    signature = make_signature(func, args, kwargs, expected)
    assert signature.name == str(func)
    again = from_json(json.loads(json.dumps(dataclasses.asdict(signature))))
    assert again == signature and hash(again) == hash(signature)
    call = make_call(again, CPU)
    assert call is not None
    for _ in range(2):
        result = call()
    assert layout(result) == layout(expected)
    assert all(bool(torch.isfinite(t).all()) for t in tensors(result) if func is aten.mm.default)


def test_fake_and_real_tensors_give_the_same() -> None:
    for func, args, kwargs in cases():
        if func is aten.bernoulli_.float:
            continue
        real = make_signature(func, args, kwargs, func(*args, **kwargs))
        mode = _torch.fake_tensor_mode()

        def fake(item: Any, mode: Any = mode) -> Any:
            if isinstance(item, torch.Tensor):
                return mode.from_tensor(item)
            return type(item)(fake(i) for i in item) if isinstance(item, (list, tuple)) else item

        with mode:
            fakes = fake(args)
            assert make_signature(func, fakes, kwargs, func(*fakes, **kwargs)) == real, func
        assert signature_key(func, fakes, kwargs) == signature_key(func, args, kwargs)


def test_keys_are_equal_exactly_when_signatures_are() -> None:
    x = torch.rand(4, 6)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        *cases(),
        (aten.mul.Tensor, (x, 1), {}),
        (aten.mul.Tensor, (x, 1.0), {}),
        (aten.mul.Tensor, (x, True), {}),
        (aten.mul.Tensor, (x, torch.rand(4, 6)), {}),
        (aten.mul.Tensor, (x, torch.rand(6, 4).t()), {}),
        (aten.mul.Tensor, (x.double(), 1), {}),
        (aten.bernoulli_.float, (torch.empty(4, 6), 0.9), {"generator": torch.Generator()}),
    ]
    found: dict[Any, Signature] = {}
    for func, args, kwargs in calls:
        signature = make_signature(func, args, kwargs, func(*args, **kwargs))
        assert found.setdefault(signature_key(func, args, kwargs), signature) == signature
    arguments = {repr((s.name, s.args, s.kwargs)) for s in found.values()}
    assert len(arguments) == len(found)


def test_bytes_are_what_must_be_read_and_written() -> None:
    x = torch.rand(4, 8)  # 128 bytes
    moved = {
        "inputs and output": (signature_of(aten.mm.default, x, x.t()), 128 + 128 + 64, 64),
        "in place": (signature_of(aten.add_.Tensor, x.clone(), x), 3 * 128, 0),
        "overwritten, not read": (signature_of(aten.zero_.default, x.clone()), 128, 0),
        "out=": (signature_of(aten.add.out, x, x, out=torch.empty(4, 8)), 3 * 128, 0),
        "stride 0 is read once": (signature_of(aten.add.Tensor, x, torch.rand(1, 1).expand(4, 8)), 2 * 128 + 4, 128),
        "views move nothing": (signature_of(aten.view.default, x, [32]), 0, 0),
        "no view where the dtype changes": (signature_of(aten.to.dtype, x, torch.bool), 128 + 32, 32),
        "a view where it does not": (signature_of(aten.to.dtype, x, torch.float32), 0, 0),
        "undeclared views": (signature_of(aten._unsafe_view.default, x, [32]), 0, 0),
        "nothing is written": (signature_of(aten.empty_like.default, x), 0, 128),
        "lists": (signature_of(aten._foreach_add_.List, [x.clone(), x.clone()], [x, x]), 6 * 128, 0),
        "only the rows asked for": (
            signature_of(aten.embedding.default, torch.rand(1000, 8), torch.zeros(3, dtype=torch.long)),
            96 + 24 + 96,
            96,
        ),
    }
    for what, (signature, bytes_moved, output_bytes) in moved.items():
        assert (signature.bytes_moved, signature.output_bytes) == (bytes_moved, output_bytes), what


def test_what_cannot_be_made_again_is_not_run() -> None:
    signature = signature_of(aten.relu.default, torch.rand(3))
    for change in (
        {"args": ("unknown:ScriptObject",)},
        {"args": (TensorSpec(shape=(3,), stride=(), dtype="float32"),)},
        {"args": (TensorSpec(shape=(3,), stride=(1,), dtype="no_such_dtype"),)},
        {"name": "aten.no_such_op.default"},
        {"name": "c10d.allreduce_.default"},
        {"name": "aten.set_.source_Tensor"},
    ):
        assert make_call(dataclasses.replace(signature, **change), CPU) is None, change


def test_made_up_indices_of_embeddings_reach_every_row() -> None:
    weight = torch.eye(16)
    call = make_call(signature_of(aten.embedding.default, weight, torch.zeros(4096, dtype=torch.long)), CPU)
    assert call is not None
    assert len({tuple(row.tolist()) for row in call()}) == 16
