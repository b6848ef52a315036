"""Ops on lazy logits that need no values: queries of metadata, and ops that the tiled loss can follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # lazy_logits imports this file
    from recoup.runtime.tile.loss.lazy_logits import LazyLogits

Follow = Callable[["LazyLogits", tuple[Any, ...], dict[str, Any]], Any]

QUESTIONS = frozenset({
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,  # type: ignore[attr-defined]
    torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_sparse.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_nested.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_quantized.__get__,  # type: ignore[attr-defined]
    torch.Tensor.itemsize.__get__,  # type: ignore[attr-defined]
    torch.Tensor._base.__get__,  # type: ignore[attr-defined, union-attr]
    torch.Tensor.__len__,
    torch.Tensor.dim,
    torch.Tensor.size,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.get_device,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
})  # fmt: skip


def writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the op changes an argument: by its name, or because it was given an `out`."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.startswith("__")
    return in_place or kwargs.get("out") is not None or name in ("__setitem__", "__set__") or name.startswith("__i")


def _derive(lazy: LazyLogits, rows: torch.Tensor, step: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    from recoup.runtime.tile.loss.lazy_logits import derive

    return derive(lazy, rows, step, make)


def _move(
    lazy: LazyLogits, move: Callable[[torch.Tensor], torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    """Applies an op that only selects or reorders tokens, to the rows of every product."""
    from recoup.runtime.tile.loss.lazy_logits import derive

    return derive(lazy, move(lazy.rows), None, make, more=tuple((move(rows), head) for rows, head in lazy.more))


def _add_product(lazy: LazyLogits, other: LazyLogits) -> Any:
    """Another product of tokens and classes, times a number, added before anything else: a low-rank adapter's."""
    from recoup.runtime.tile.loss.lazy_logits import derive

    scales = [value for kind, value in other.steps if kind == "mul"]
    fits = other.shape == lazy.shape and other.dtype == lazy.dtype and len(scales) == len(other.steps)
    if not fits or lazy.steps or other.bias is not None or other.more or other.is_made():
        return None
    rows = other.rows
    for scale in scales:
        rows = rows * scale
    return derive(lazy, lazy.rows, None, lambda real: real + other.made(), more=(*lazy.more, (rows, other.head)))


def _add(lazy: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One number for each class, added before anything else, is a bias."""
    from recoup.runtime.tile.loss.lazy_logits import LazyLogits, derive

    more = args[0] if len(args) == 1 else None
    if isinstance(more, LazyLogits) and not kwargs:
        return _add_product(lazy, more)
    if kwargs or lazy.steps or type(more) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return None
    assert isinstance(more, torch.Tensor)
    classes = lazy.shape[-1]
    if more.numel() != classes or more.shape[-1:] != (classes,) or more.dim() > lazy.dim() or more.dtype != lazy.dtype:
        return None
    bias = more.reshape(classes) if lazy.bias is None else lazy.bias + more.reshape(classes)
    return derive(lazy, lazy.rows, None, lambda real: real + more, bias)


def _view(lazy: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from recoup.runtime.tile.loss.lazy_logits import same_rows

    sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    if kwargs or not all(isinstance(size, int) for size in sizes):
        return None
    shape = same_rows(tuple(lazy.shape), tuple(sizes))
    if shape is None:
        return None
    return _move(lazy, lambda rows: rows.reshape(*shape[:-1], rows.shape[-1]), lambda real: real.reshape(shape))


def _flatten(lazy: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bounds = (*args, *kwargs.values())
    if bounds not in ((0, lazy.dim() - 2), (0, -2)) or lazy.dim() < 2 or any(k not in _ENDS for k in kwargs):
        return None
    return _view(lazy, (-1, lazy.shape[-1]), {})


_ENDS = ("start_dim", "end_dim")


def _index(lazy: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    lead = lazy.dim() - 1
    if not all(item is Ellipsis or type(item) in (int, slice) for item in index):
        return None
    if index.count(Ellipsis) > 1:
        return None
    if Ellipsis in index:
        at = index.index(Ellipsis)
        missing = lazy.dim() - (len(index) - 1)
        if missing < 0:
            return None
        index = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
    if len(index) > lead:
        if len(index) > lazy.dim() or index[-1] != slice(None):
            return None
        index = index[:-1]
    return _move(lazy, lambda rows: rows[index], lambda real: real[index])


def _to(lazy: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 1 or kwargs:
        return None
    if isinstance(args[0], (str, torch.device)):
        return lazy if torch.device(args[0]) == lazy.device else None
    return _cast(lazy, args[0]) if isinstance(args[0], torch.dtype) else None


def _cast(lazy: LazyLogits, dtype: torch.dtype) -> Any:
    if dtype == lazy.dtype:
        return lazy
    if not dtype.is_floating_point:
        return None
    return _derive(lazy, lazy.rows, ("to", dtype), lambda real: real.to(dtype))


def _scale(kind: str) -> Follow:
    def follow(lazy: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) != 1 or kwargs or type(args[0]) not in (int, float):
            return None
        value = args[0]
        op = torch.mul if kind == "mul" else torch.div
        return _derive(lazy, lazy.rows, (kind, value), lambda real: op(real, value))

    return follow


def _tanh(lazy: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return None if args or kwargs else _derive(lazy, lazy.rows, ("tanh", None), torch.tanh)


def _same(lazy: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return None if args or kwargs else lazy


MOVES: dict[Any, Follow] = {
    torch.Tensor.view: _view,
    torch.Tensor.reshape: _view,
    torch.reshape: _view,
    torch.Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    torch.Tensor.__getitem__: _index,
    torch.Tensor.contiguous: _same,
}
"""Ops that select or reorder tokens, on logits and on whatever is made of them class by class."""

OPS: dict[Any, Follow] = {
    **MOVES,
    torch.Tensor.to: _to,
    torch.Tensor.float: lambda lazy, args, kwargs: None if args or kwargs else _cast(lazy, torch.float32),
    torch.Tensor.double: lambda lazy, args, kwargs: None if args or kwargs else _cast(lazy, torch.float64),
    torch.Tensor.mul: _scale("mul"),
    torch.Tensor.__mul__: _scale("mul"),
    torch.Tensor.__rmul__: _scale("mul"),
    torch.mul: _scale("mul"),
    torch.Tensor.div: _scale("div"),
    torch.Tensor.__truediv__: _scale("div"),
    torch.div: _scale("div"),
    torch.Tensor.add: _add,
    torch.Tensor.__add__: _add,
    torch.add: _add,
    torch.Tensor.tanh: _tanh,
    torch.tanh: _tanh,
}
"""Functions as torch hands them to a tensor subclass -> what they make of logits that are not there."""
