"""One distinct op as plain data: its name and its arguments, tensors replaced by shape, stride and dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from recoup.cost.flops import count_flops
from recoup.ir.trace import Signature, TensorSpec


def signature_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns something hashable that is equal exactly when `make_signature` would return the same."""
    return (func, _key(args), _key(tuple(kwargs.items())) if kwargs else ())


def _key(items: Any) -> tuple[Any, ...]:
    result: list[Any] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            if item.layout is torch.strided:
                result.append((item.size(), item.stride(), item.dtype))
            else:
                result.append((item.size(), item.layout, item.dtype))
        elif isinstance(item, (list, tuple)):
            result.append(_key(item))
        elif isinstance(item, (bool, int, float, complex, str, type(None))):
            result.append((type(item), item))
        else:
            result.append(str(item))
    return tuple(result)


def make_signature(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Signature:
    """Returns the signature of a dispatched op.

    Args:
        func: the overload. args, kwargs: as dispatched, tensors fake or real. outputs: what it returned.
    """
    inputs = list(_tensors((args, tuple(kwargs.values()))))
    results = list(_tensors((outputs,)))
    is_view = _is_view(func)
    output_bytes = sum(_num_bytes(t) for t in results)
    moved = 0 if is_view else sum(_num_bytes(t) for t in inputs) + output_bytes
    encoded = tuple(_encode(a) for a in args)
    encoded_kwargs = tuple((k, _encode(v)) for k, v in kwargs.items())
    name = f"{func._schema.name.replace('::', '.')}.{func._overloadname}"
    output_spec = tuple(_encode(t) for t in results)
    return Signature(
        name=name,
        args=encoded,
        kwargs=encoded_kwargs,
        flops=0 if is_view else count_flops(name, encoded, dict(encoded_kwargs), output_spec),
        bytes_moved=moved,
        output_bytes=0 if is_view else output_bytes,
        is_view=is_view,
    )


def _is_view(func: Any) -> bool:
    schema = func._schema
    return bool(schema.returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _tensors(nest: Any) -> Iterator[torch.Tensor]:
    for item in nest:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)


def _encode(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        stride = tuple(int(s) for s in item.stride()) if item.layout is torch.strided else ()
        return TensorSpec(
            shape=tuple(int(s) for s in item.shape), stride=stride, dtype=str(item.dtype).removeprefix("torch.")
        )
    if isinstance(item, (list, tuple)):
        return tuple(_encode(i) for i in item)
    if isinstance(item, (bool, int, float, complex, str, type(None))):
        return item
    if isinstance(item, torch.SymInt):
        return int(item)
    for kind, cls in (
        ("dtype", torch.dtype),
        ("device", torch.device),
        ("layout", torch.layout),
        ("memory_format", torch.memory_format),
    ):
        if isinstance(item, cls):
            return f"{kind}:{str(item).removeprefix('torch.')}"
    if isinstance(item, torch.Generator):
        return None
    return f"unknown:{type(item).__name__}"
