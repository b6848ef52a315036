"""Ops along the classes of lazy logits: log-probabilities, entropy, and their sums.

Ops that keep the classes (log-softmax, exp, products of two of them) are composed into `LazyLogits.after`, a function
of one tile's logits. Ops that leave no classes (gather, logsumexp, sum) run it over tiles. So the log-probabilities of
chosen tokens, or an entropy, as trainers write them (in one piece, example by example, or in chunks of rows) need no
logits; each such op makes the logits of its tokens once in forward and once in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from recoup.runtime import execution_context
from recoup.runtime.tile.loss.function import tiled_loss
from recoup.runtime.tile.loss.per_token import FunctionSpec

if TYPE_CHECKING:  # lazy_logits imports this file
    from recoup.runtime.tile.loss.lazy_logits import LazyLogits

Classwise = Callable[[torch.Tensor], torch.Tensor]
Follow = Callable[["LazyLogits", tuple[Any, ...], dict[str, Any]], Any]


def _then(lazy: LazyLogits, op: Classwise, make: Classwise | None = None, dtype: torch.dtype | None = None) -> Any:
    """Returns the lazy result of an op that keeps the classes; `make` is the op on real values, `op` if not given."""
    from recoup.runtime.tile.loss.lazy_logits import derive

    before = lazy.after

    def after(logits_TV: torch.Tensor) -> torch.Tensor:
        return op(logits_TV if before is None else before(logits_TV))

    return derive(lazy, lazy.rows, None, make or op, after=after, dtype=dtype)


def run(lazy: LazyLogits, function: Callable[..., torch.Tensor], cut: Sequence[torch.Tensor], columns: int) -> Any:
    """Returns what a function makes of each token's classes, (N,) or (N, K), over tiles; in the dtype of `lazy`.

    Args:
        function: ((T, V), *cut) -> (T,) or (T, K).
        cut: tensors with a row a token.
        columns: K, 0 for (T,).
    """
    head = lazy.head
    for each in (head, *(other for _, other in lazy.more)):
        each.check()
    execution_context.count("num_tiled", execution_context.current_counts())
    after = lazy.after
    spec = FunctionSpec(
        function=lambda logits_TV, *others: function(logits_TV if after is None else after(logits_TV), *others),
        steps=lazy.steps,
        tile_tokens=head.tile_tokens,
        num_cut=1 + len(cut),
        num_columns=columns,
    )
    rows, matrix, bias, more = lazy.operands()
    counts = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    found = head.when_backward_begins(tiled_loss(rows, matrix, bias, [counts, *cut], spec, more))
    return found.to(lazy.dtype)


def _is_last(lazy: LazyLogits, dim: Any) -> bool:
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return isinstance(dim, int) and not isinstance(dim, bool) and dim in (-1, lazy.dim() - 1)


def _arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments by name, None if there are others."""
    if len(args) > len(names) or any(name not in names for name in kwargs):
        return None
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _softmax(op: Callable[..., torch.Tensor], names: tuple[str, ...]) -> Follow:
    def follow(lazy: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _arguments(names, args, kwargs)
        if given is None or not _is_last(lazy, given.get("dim")):
            return None
        dtype = given.get("dtype")
        if dtype is not None and not dtype.is_floating_point:
            return None
        return _then(lazy, lambda x: op(x, -1), lambda x: op(x, -1, dtype=dtype), dtype)

    return follow


_METHOD, _FUNCTION = ("dim", "dtype"), ("dim", "_stacklevel", "dtype")


def _pointwise(op: Classwise) -> Follow:
    return lambda lazy, args, kwargs: None if args or kwargs else _then(lazy, op)


def _mul(lazy: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A number, or something of the very same tokens' classes."""
    from recoup.runtime.tile.loss.lazy_logits import LazyLogits, derive

    other = args[0] if len(args) == 1 and not kwargs else None
    if isinstance(other, (int, float)) and not isinstance(other, bool):
        return _then(lazy, lambda x: x * other)
    if not isinstance(other, LazyLogits) or other.is_made() or other.dtype != lazy.dtype:
        return None
    same = other.head is lazy.head and other.rows is lazy.rows and other.bias is lazy.bias and other.more is lazy.more
    if not same or other.steps != lazy.steps:
        return None
    one, two = lazy.after, other.after

    def after(logits_TV: torch.Tensor) -> torch.Tensor:
        a = logits_TV if one is None else one(logits_TV)
        return a * (logits_TV if two is None else two(logits_TV))

    return derive(lazy, lazy.rows, None, lambda real: real * other.made(), after=after)


def _gather(lazy: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _arguments(("dim", "index"), args, kwargs)
    index = given.get("index") if given is not None else None
    if given is None or type(index) is not torch.Tensor or not _is_last(lazy, given.get("dim")):
        return None
    if index.dtype != torch.int64 or index.shape[:-1] != lazy.shape[:-1] or not index.numel():
        return None
    flat = index.reshape(-1, index.shape[-1])
    return run(lazy, lambda x_TV, i_TK: x_TV.gather(1, i_TK), [flat], flat.shape[1]).view(index.shape)


def _over_classes(op: Classwise) -> Follow:
    def follow(lazy: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _arguments(("dim", "keepdim"), args, kwargs)
        if given is None or not _is_last(lazy, given.get("dim")) or lazy.dim() < 2:
            return None
        found = run(lazy, op, [], 0).view(lazy.shape[:-1])
        return found.unsqueeze(-1) if given.get("keepdim") else found

    return follow


def _parts(lazy: LazyLogits, sizes: Sequence[int] | None) -> Any:
    """Returns slices of the first dimension, or with None its items; None where that is the classes' or a row's."""
    from recoup.runtime.tile.loss import lazy_ops

    if lazy.dim() < (3 if sizes is None else 2):
        return None
    index = lazy_ops.OPS[torch.Tensor.__getitem__]
    if sizes is None:
        return tuple(index(lazy, (i,), {}) for i in range(len(lazy)))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(index(lazy, (slice(end - size, end),), {}) for size, end in zip(sizes, ends, strict=True))


def _split(lazy: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _arguments(("size", "dim"), args, kwargs)
    size = given.get("size") if given is not None else None
    if given is None or given.get("dim", 0) != 0 or type(size) is not int or size < 1 or lazy.dim() < 2:
        return None
    return _parts(lazy, [min(size, len(lazy) - start) for start in range(0, len(lazy), size)])


def _unbind(lazy: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _arguments(("dim",), args, kwargs)
    return _parts(lazy, None) if given is not None and given.get("dim", 0) == 0 else None


def _iterate(lazy: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts = _parts(lazy, None)
    return None if parts is None else iter(parts)


_log_softmax_method = _softmax(torch.log_softmax, _METHOD)
_softmax_method = _softmax(torch.softmax, _METHOD)
_lse = _over_classes(lambda x_TV: x_TV.logsumexp(1))
_sum = _over_classes(lambda x_TV: x_TV.sum(1))

OPS: dict[Any, Follow] = {
    torch.Tensor.log_softmax: _log_softmax_method,
    torch.log_softmax: _log_softmax_method,
    functional.log_softmax: _softmax(torch.log_softmax, _FUNCTION),
    torch.Tensor.softmax: _softmax_method,
    torch.softmax: _softmax_method,
    functional.softmax: _softmax(torch.softmax, _FUNCTION),
    torch.Tensor.gather: _gather,
    torch.gather: _gather,
    torch.Tensor.logsumexp: _lse,
    torch.logsumexp: _lse,
    torch.Tensor.split: _split,
    torch.split: _split,
    torch.Tensor.unbind: _unbind,
    torch.unbind: _unbind,
    torch.Tensor.__iter__: _iterate,
}
"""What is followed on logits, and on what was made of them along the classes."""

AFTER: dict[Any, Follow] = {
    torch.Tensor.exp: _pointwise(torch.exp),
    torch.exp: _pointwise(torch.exp),
    torch.Tensor.neg: _pointwise(torch.neg),
    torch.Tensor.__neg__: _pointwise(torch.neg),
    torch.neg: _pointwise(torch.neg),
    torch.Tensor.mul: _mul,
    torch.Tensor.__mul__: _mul,
    torch.Tensor.__rmul__: _mul,
    torch.mul: _mul,
    torch.Tensor.sum: _sum,
    torch.sum: _sum,
}
"""What is followed only on the latter."""
