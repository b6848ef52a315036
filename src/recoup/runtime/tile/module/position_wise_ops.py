"""Which ops of a traced forward work on each position by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from recoup import _torch

Rows = tuple[tuple[int, int, int], ...]
"""The dimensions of a tensor that are positions: (dimension, size, stride in rows), those of size 1 left out."""

_SHARES_STORAGE = frozenset({"_unsafe_view", "lift_fresh", "alias", "detach"})
_LIKE_POINTWISE = frozenset(
    {"_to_copy", "clone", "copy", "empty_like", "fill", "full_like", "masked_fill", "ones_like", "zeros_like"}
)
_REDUCTIONS = frozenset(
    {"all", "amax", "amin", "any", "argmax", "argmin", "linalg_vector_norm", "logsumexp", "max", "mean", "min"}
    | {"norm", "prod", "std", "std_mean", "sum", "var", "var_mean"}
)
_ALONG_A_DIM = frozenset(
    {"_log_softmax", "_safe_softmax", "_softmax", "cumprod", "cumsum", "flip", "glu", "sort", "topk"}
)
_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm"})
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_addmm_activation": 1}  # where the left factor is


class MixesPositions(Exception):
    """An op that does not keep positions apart; carries the reason."""


class Judge(_torch.dispatch_mode_class()):  # type: ignore[misc]
    """Follows which storages hold rows, op by op.

    Attributes:
        reason: why the first op that does not keep positions apart does not; "" so far.
    """

    def __init__(self, given: Sequence[torch.Tensor], leading: tuple[int, ...]) -> None:
        super().__init__()
        self.reason = ""
        self.ops: list[str] = []
        self._leading = leading
        self._num_rows = math.prod(leading)
        self._row_bytes: dict[int, int] = {}
        self._made: set[int] = set()  # storages of this run: only those may be written
        self._held: list[torch.Tensor] = list(given)  # an address is not given out twice
        for tensor in given:
            self._row_bytes[_address(tensor)] = tensor.nbytes // self._num_rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _torch.is_higher_order(func):
            self.reason = self.reason or f"`{func}` has branches or loops of its own"
            raise MixesPositions(self.reason)
        if any(_address(t) not in self._made for t in _torch.written_arguments(func, args, kwargs)):
            self._refuse(func, "changes a parameter, a buffer or an input in place")  # before it does
        out = func(*args, **kwargs)
        if func.namespace == "prim":
            return out
        numbers = [a for a in args if isinstance(a, (bool, int, float))] if torch.Tag.pointwise in func.tags else []
        self.ops.append(f"{func._schema.name}.{func._overloadname} {numbers}")
        outputs = _tensors(out)
        self._held += outputs
        try:
            self._follow(func, args, kwargs, outputs)
        except MixesPositions as mixes:
            self._refuse(func, str(mixes))
        return out

    def _refuse(self, func: Any, what: str) -> None:
        self.reason = self.reason or f"`{func._schema.name.removeprefix('aten::')}` {what}"
        raise MixesPositions(self.reason)

    def judge_output(self, output: Any) -> str:
        """Returns why the function's result is not a row a position, "" if it is."""
        if not isinstance(output, torch.Tensor):
            return f"it returns a {type(output).__name__}, not a tensor"
        if tuple(output.shape[: len(self._leading)]) != self._leading or output.dim() <= len(self._leading):
            return f"it returns {list(output.shape)}, not a row for each of the positions {list(self._leading)}"
        try:
            rows = self._rows(output)
        except MixesPositions as mixes:
            return f"its result {mixes}"
        if rows != self._leading_rows():
            return "its result does not depend on the positions, or has them in another order"
        return ""

    def _leading_rows(self) -> Rows:
        found: list[tuple[int, int, int]] = []
        step = 1
        for dim in range(len(self._leading) - 1, -1, -1):
            if self._leading[dim] > 1:
                found.append((dim, self._leading[dim], step))
            step *= self._leading[dim]
        return tuple(reversed(found))

    # -- geometry -------------------------------------------------------------------------------------------------

    def _rows(self, tensor: torch.Tensor) -> Rows:
        """Returns which dimensions of a tensor are positions, () if it is the same for all of them.

        Raises:
            MixesPositions: if it is a view over rows that does not take the same part of every row, in order.
        """
        row_bytes = self._row_bytes.get(_address(tensor))
        if row_bytes is None:
            return ()
        itemsize = tensor.element_size()
        rows, num, inside = [], 1, 0
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            nbytes = stride * itemsize
            if size == 1:
                continue
            if nbytes >= row_bytes and nbytes % row_bytes == 0:
                rows.append((dim, size, nbytes // row_bytes))
                num *= size
            else:
                inside += (size - 1) * nbytes
        if num != self._num_rows or tensor.storage_offset() * itemsize + inside + itemsize > row_bytes:
            raise MixesPositions("reads some positions and not others, or across them")
        step = 1
        for _, size, stride in sorted(rows, key=lambda r: r[2]):
            if stride != step:
                raise MixesPositions("reads positions out of order")
            step *= size
        return tuple(rows)

    def _hold(self, output: torch.Tensor, rows: Rows) -> None:
        """Notes that a result holds rows, and checks that they lie as rows do."""
        row_bytes = max(output.numel() // self._num_rows, 1) * output.element_size()
        self._row_bytes.setdefault(_address(output), row_bytes)  # written in place, it has rows already
        if self._rows(output) != rows:
            raise MixesPositions("gives a result in which a position's values do not lie together")

    # -- ops ------------------------------------------------------------------------------------------------------

    def _follow(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        name = func._schema.name.split("::")[-1]
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise MixesPositions("draws random numbers, which tiles would draw in another order")
        written = _torch.written_arguments(func, args, kwargs)
        inputs = _tensors((args, tuple(kwargs.values())))
        sources = {_address(t) for t in inputs}
        self._made |= {_address(t) for t in outputs if _address(t) not in sources}
        depends = [t for t in inputs if _address(t) in self._row_bytes]
        is_view = name in _SHARES_STORAGE or (
            not written and any(a.alias_info is not None for a in func._schema.arguments)
        )
        if not depends or is_view:
            return
        plain = name[:-1] if written and name.endswith("_") else name
        rows = self._judge(plain, func, args, kwargs, outputs)
        for output, expected in zip(outputs, rows, strict=True):
            self._hold(output, expected)

    def _judge(self, name: str, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> list[Rows]:
        """Returns the positions of each result."""
        if func.namespace != "aten":
            raise MixesPositions("is not an op of PyTorch's own")
        get = _Arguments(func, args, kwargs)
        if name in _PRODUCTS:
            return [self._product(name, args)]
        if name in _REDUCTIONS and get.has("dim"):
            return [self._reduced(get["self"], get["dim"], bool(get["keepdim"]))] * len(outputs)
        if name in _ALONG_A_DIM:
            rows = self._rows(get["self"])
            dims = get["dims"] if name == "flip" else get["dim"]
            _inside(rows, dims, get["self"].dim())
            return [rows] * len(outputs)
        if name in _NORMS:
            rows = self._rows(args[0])
            normalized = len(args[1])
            _inside(rows, list(range(args[0].dim() - normalized, args[0].dim())), args[0].dim())
            self._same_for_all(args[2:4])
            return [rows] * len(outputs)
        if name == "embedding":
            self._same_for_all(args[:1])
            return [self._rows(args[1])]
        if name in ("cat", "stack"):
            return [self._joined(name, args[0], get["dim"], outputs[0])]
        if torch.Tag.pointwise in func.tags or name in _LIKE_POINTWISE:
            return [self._pointwise(_tensors((args, tuple(kwargs.values()))), o) for o in outputs]
        raise MixesPositions("is not known to keep positions apart")

    def _pointwise(self, operands: Sequence[torch.Tensor], output: torch.Tensor) -> Rows:
        found = {
            tuple((dim + output.dim() - t.dim(), size, step) for dim, size, step in self._rows(t))
            for t in operands
            if _address(t) in self._row_bytes
        }
        if len(found) != 1:
            raise MixesPositions("reads values of different positions together")
        rows = found.pop()
        for tensor in operands:
            if _address(tensor) in self._row_bytes:
                continue
            for dim, _, _ in rows:
                own = dim - output.dim() + tensor.dim()
                if own >= 0 and tensor.shape[own] != 1:
                    raise MixesPositions(
                        "reads a tensor with a value for each position that is not one of its arguments"
                    )
        return rows

    def _product(self, name: str, args: Any) -> Rows:
        at = _PRODUCTS[name]
        left, right = args[at], args[at + 1]
        rows, other = self._rows(left), self._rows(right)
        dims = [dim for dim, _, _ in rows]
        if not rows or left.dim() - 1 in dims:
            raise MixesPositions("sums over positions")
        if other and not (other == rows and dims == [0] and left.dim() == 3):
            raise MixesPositions("multiplies positions with each other")
        if left.dim() == 3 and 0 in dims and not other and right.stride(0) != 0 and right.shape[0] != 1:
            raise MixesPositions("reads a tensor with a value for each position that is not one of its arguments")
        if at == 1:
            self._pointwise([left, args[0]], left)
        return rows

    def _reduced(self, tensor: torch.Tensor, dims: Any, keeps: bool) -> Rows:
        rows = self._rows(tensor)
        removed = _inside(rows, dims, tensor.dim())
        if keeps:
            return rows
        return tuple((dim - sum(r < dim for r in removed), size, step) for dim, size, step in rows)

    def _joined(self, name: str, tensors: Sequence[torch.Tensor], dim: int | None, output: torch.Tensor) -> Rows:
        if any(_address(t) not in self._row_bytes for t in tensors):
            raise MixesPositions("joins what depends on the positions with what does not")
        found = {self._rows(t) for t in tensors}
        if len(found) != 1:
            raise MixesPositions("reads values of different positions together")
        rows = found.pop()
        at = (dim or 0) % output.dim()
        if name == "stack":
            return tuple((d + (at <= d), size, step) for d, size, step in rows)
        _inside(rows, at, output.dim())
        return rows

    def _same_for_all(self, items: Sequence[Any]) -> None:
        if any(isinstance(t, torch.Tensor) and _address(t) in self._row_bytes for t in items):
            raise MixesPositions("reads values of different positions together")


class _Arguments:
    """The arguments of an op by the names of its schema."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self._schema, self._args, self._kwargs = func._schema, args, kwargs

    def has(self, name: str) -> bool:
        return any(a.name == name for a in self._schema.arguments)

    def __getitem__(self, name: str) -> Any:
        for position, argument in enumerate(self._schema.arguments):
            if argument.name == name:
                if position < len(self._args):
                    return self._args[position]
                return self._kwargs.get(name, argument.default_value)
        return None


def _inside(rows: Rows, dims: Any, num_dims: int) -> list[int]:
    """Returns the dimensions that an op works along.

    Raises:
        MixesPositions: if one of them is a position.
    """
    given = [dims] if isinstance(dims, int) else dims
    if not given:
        raise MixesPositions("works along all dimensions, positions included")
    found = [d % num_dims for d in given]
    if any(dim in found for dim, _, _ in rows):
        raise MixesPositions("works along the positions")
    return found


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(nest: Any) -> list[torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        return [nest]
    return [t for item in nest for t in _tensors(item)] if isinstance(nest, (list, tuple)) else []
