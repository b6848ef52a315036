"""One distinct op as plain data: its name and its arguments, tensors replaced by shape, stride and dtype."""

from __future__ import annotations

import math
from typing import Any

import torch

from recoup import _torch
from recoup._pytree import argument_tensors
from recoup.cost.flops import count_flops, op_name
from recoup.ir.trace import Signature, TensorSpec

# They say they return a new tensor and return the old one.
_UNDECLARED_VIEWS = frozenset({"_unsafe_view", "lift_fresh"})
# They hand out memory and do not touch it.
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
# In-place ops that write their first argument without reading it.
_OVERWRITERS = frozenset({"bernoulli", "copy", "exponential", "fill", "normal", "random", "uniform", "zero"})
# They read only what their indices name: as much of the first argument (or, for the backward, of the result) as there
# is in the rest.
_GATHERS = frozenset({"embedding", "gather", "index", "index_select", "nll_loss_forward", "take"})


def signature_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, home: str = "cpu") -> Any:
    """Returns a hashable key; two calls have equal keys exactly if `make_signature` gives them equal signatures."""
    return (func, _key(args, home), _key(tuple(kwargs.items()), home) if kwargs else ())


def _key(items: Any, home: str) -> tuple[Any, ...]:
    result: list[Any] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            device = _away(item, home)
            if item.layout is torch.strided:
                result.append((item.shape, item.stride(), item.dtype, device))  # `size()` takes 20 us on a fake tensor
            else:
                result.append((item.shape, item.layout, item.dtype, device))
        elif isinstance(item, (list, tuple)):
            result.append(_key(item, home))
        elif isinstance(item, (bool, int, float, complex, str, type(None))):
            result.append((type(item), item))
        elif not isinstance(item, torch.Generator):
            result.append(str(item))
        else:
            result.append(None)
    return tuple(result)


def _away(tensor: torch.Tensor, home: str) -> str:
    """Returns the type of the tensor's device where it is not the step's; a step on a CPU has no other."""
    if home == "cpu":
        return ""
    found = _torch.device_type(tensor)
    return "" if found == home else found


def make_signature(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any, *, home: str = "cpu"
) -> Signature:
    """Returns the signature of a dispatched op.

    `bytes_moved` is what the op has to read and write at least once: its inputs (a dimension of stride 0 only once),
    what it writes in place, and its new outputs. `output_bytes` is what it newly allocates for its outputs; results
    that are an argument written in place, or a view of one, are not new.

    Args:
        func: the overload.
        args, kwargs: as dispatched, tensors fake or real.
        outputs: what it returned.
        home: the type of the step's device.
    """
    name = f"{func._schema.name.replace('::', '.')}.{func._overloadname}"
    short = op_name(name)
    encoded = tuple(_encode(a, home) for a in args)
    encoded_kwargs = tuple((k, _encode(v, home)) for k, v in kwargs.items())
    results = list(argument_tensors((outputs,)))
    # `prim` ops ask a tensor for its device or dtype.
    is_view = short in _UNDECLARED_VIEWS or name.startswith("prim.") or (_is_view(func) and not _copied(args, results))
    written = _torch.written_arguments(func, args, kwargs)
    fresh = [] if is_view else [t for t in results if not any(t is w for w in written)]
    is_idle = is_view or short in _ALLOCATIONS
    return Signature(
        name=name,
        args=encoded,
        kwargs=encoded_kwargs,
        flops=0 if is_idle else count_flops(name, encoded, dict(encoded_kwargs), _encode_outputs(outputs)),
        bytes_moved=0 if is_idle else _bytes_moved(func, args, kwargs, written, fresh),
        output_bytes=sum(_num_bytes(t) for t in fresh),
        is_view=is_view,
    )


def _is_view(func: Any) -> bool:
    schema = func._schema
    return bool(schema.returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _copied(args: tuple[Any, ...], results: list[torch.Tensor]) -> bool:
    """Whether what may return a view (`to`, `reshape`, which arrive whole below autograd) made something new."""
    if any(t.layout is not torch.strided for t in results):
        return False
    storages = {t.untyped_storage()._cdata for t in argument_tensors(args) if t.layout is torch.strided}
    return any(t.untyped_storage()._cdata not in storages for t in results)


def _bytes_moved(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    written: list[torch.Tensor],
    fresh: list[torch.Tensor],
) -> int:
    short = op_name(func._schema.name.replace("::", "."))
    overwrites = any(argument.is_out for argument in func._schema.arguments)
    inputs = list(argument_tensors((args, tuple(kwargs.values()))))
    writes = sum(_num_bytes(t) for t in (*written, *fresh))
    if written and (short in _OVERWRITERS or overwrites):
        inputs = [t for t in inputs if not any(t is w for w in written)]
    if short in _GATHERS and inputs:
        source, indices = inputs[0], sum(_touched_bytes(t) for t in inputs[1:])
        elements = max(sum(t.numel() for t in fresh), max((t.numel() for t in inputs[1:]), default=0))
        return min(_touched_bytes(source), elements * source.dtype.itemsize) + indices + writes
    return sum(_touched_bytes(t) for t in inputs) + writes


def _num_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel()) * tensor.dtype.itemsize


def _touched_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return _num_bytes(tensor)
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return int(math.prod(sizes)) * tensor.dtype.itemsize


def _encode_outputs(outputs: Any) -> tuple[Any, ...]:
    # Several results are a tuple, a list of tensors is one result.
    return tuple(_encode(o) for o in outputs) if isinstance(outputs, tuple) else (_encode(outputs),)


def _encode(item: Any, home: str = "cpu") -> Any:
    if isinstance(item, torch.Tensor):
        stride = tuple(int(s) for s in item.stride()) if item.layout is torch.strided else ()
        return TensorSpec(
            shape=tuple(int(s) for s in item.shape),
            stride=stride,
            dtype=str(item.dtype).removeprefix("torch."),
            device=_away(item, home),
        )
    if isinstance(item, (list, tuple)):
        return tuple(_encode(i, home) for i in item)
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
