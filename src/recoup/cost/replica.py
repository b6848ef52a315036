"""From a signature back to a call that can be run: the same op on tensors of the same shapes, strides and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from recoup.ir.trace import Signature, TensorSpec


def make_call(signature: Signature, device: torch.device) -> Callable[[], Any] | None:
    """Returns a function that runs the op on fresh data, None where an argument cannot be made again.

    Floats are drawn at random in [0.5, 1.5); integers are zeros, which are valid indices everywhere; booleans True.
    """
    namespace, name, overload = [*signature.name.split("."), "default"][:3]
    packet = getattr(getattr(torch.ops, namespace), name, None)
    function = getattr(packet, overload or "default", None)
    if function is None:
        return None
    try:
        args = [_decode(a, device) for a in signature.args]
        kwargs = {k: _decode(v, device) for k, v in signature.kwargs}
    except _CannotDecode:
        return None
    return lambda: function(*args, **kwargs)


class _CannotDecode(Exception):
    pass


def _decode(item: Any, device: torch.device) -> Any:
    if isinstance(item, TensorSpec):
        return _tensor(item, device)
    if isinstance(item, (list, tuple)):
        return [_decode(i, device) for i in item]
    if isinstance(item, str) and ":" in item:
        kind, _, name = item.partition(":")
        if kind == "device":
            return device
        if kind in ("dtype", "layout", "memory_format"):
            return getattr(torch, name)
        raise _CannotDecode
    return item


def _tensor(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    if len(spec.stride) != len(spec.shape):
        raise _CannotDecode
    dtype = getattr(torch, spec.dtype)
    extent = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True)) if 0 not in spec.shape else 0
    if dtype.is_floating_point and dtype.itemsize >= 2:
        flat = torch.rand(extent, device=device, dtype=torch.float32).add_(0.5).to(dtype)
    elif dtype == torch.bool:
        flat = torch.ones(extent, device=device, dtype=dtype)
    else:
        flat = torch.zeros(extent, device=device, dtype=dtype)
    return flat.as_strided(spec.shape, spec.stride)
