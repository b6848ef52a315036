"""Whether a function treats each position by itself: proved from the ops that it runs, never assumed from a name.

The function is run once under fake tensors (nothing is allocated) and every op it dispatches is judged. A storage that
depends on the positions holds *rows*: one block of bytes for each position, in order. A view over it is geometry: it
may split, permute or cut what is inside a row, and its strides tell which of its dimensions are positions. An op is
let through if it is known to make each row of its result from the same row of what it reads and from what is the same
for all rows: pointwise ops, products with a right factor, norms, softmax and sums inside a row. Anything else, an op
that nobody listed here included, ends the proof, with the reason.

What autograd will do is checked as well: a backward of its own (`torch.autograd.Function`) may do anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What running a function under fake tensors told.

    Attributes:
        reason: why it is not position-wise; "" if it is.
        leaves: the parameters, and other leaves, that a gradient flows to, what it was given left out.
        ops: the names of what it ran, pointwise ones with their numbers.
    """

    reason: str
    leaves: tuple[torch.Tensor, ...] = ()
    ops: tuple[str, ...] = ()


class _Mixes(Exception):
    """An op that does not keep positions apart; carries the reason."""


def prove(
    function: Callable[[list[torch.Tensor]], Any], tiled: Sequence[torch.Tensor], leading: tuple[int, ...]
) -> Proof:
    """Returns whether `function` treats each position of `tiled` by itself and returns one row for each.

    Args:
        function: takes stand-ins for `tiled`, a list, and returns a tensor.
        tiled: real or fake, (..., H). leading: the leading sizes of the stand-ins: the positions.
    """
    mode = next((_torch.mode_of_fake(t) for t in tiled if _torch.is_fake(t)), None) or _torch.fake_tensor_mode()
    hooks = _torch.saved_tensors_hooks(lambda t: None, lambda t: t)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # they come again when it runs
        for context in (_torch.without_dispatch_modes(), _torch.quiet_fake_errors(), mode, torch.enable_grad()):
            stack.enter_context(context)
        stack.enter_context(hooks)
        stack.enter_context(_without_autocast_cache())
        given = [_stand_in(t, leading) for t in tiled]
        first_node = _torch.next_node_number()
        judge = _Judge(given, leading)
        try:
            with judge:
                output = function(given)
        except _Mixes:
            return Proof(reason=judge.reason)
        except Exception as error:  # the user's code runs here, without data: whatever it raises ends the proof
            text = str(error).strip().splitlines()
            return Proof(reason=f"it cannot be run without data ({type(error).__name__}: {text[0] if text else ''})")
        reason = judge.reason or judge.judge_output(output)
        leaves: tuple[torch.Tensor, ...] = ()
        if not reason:
            reason, leaves = _judge_graph(output, given, first_node)
    return Proof(reason=reason, leaves=leaves, ops=tuple(judge.ops))


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Keeps a fake cast of a weight from being found by the real forward."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _stand_in(tensor: torch.Tensor, leading: tuple[int, ...]) -> torch.Tensor:
    device = _torch.fake_device(tensor) if _torch.is_fake(tensor) else tensor.device
    made = torch.empty((*leading, tensor.shape[-1]), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def _judge_graph(output: torch.Tensor, given: list[torch.Tensor], first: int) -> tuple[str, tuple[torch.Tensor, ...]]:
    """Returns what in the graph rules tiles out ("" if nothing), and the leaves that are not among `given`."""
    leaves: list[torch.Tensor] = []
    for node in graph_nodes(output):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return f"{type(node).__name__.removesuffix('Backward')} has a backward of its own", ()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            if not any(leaf is g for g in given):
                leaves.append(leaf)
        elif _torch.node_number(node) < first:
            return "it reads a tensor that needs a gradient and is neither its argument nor a parameter", ()
    return "", tuple(leaves)


def graph_nodes(output: torch.Tensor) -> list[Any]:
    """Returns the autograd nodes behind a tensor."""
    seen: dict[Any, None] = {}
    stack = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen[node] = None
        stack += [below for below, _ in node.next_functions]
    return list(seen)


class _Judge(_torch.dispatch_mode_class()):  # type: ignore[misc]
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
            raise _Mixes(self.reason)
        if any(_address(t) not in self._made for t in _written(func, args, kwargs)):
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
        except _Mixes as mixes:
            self._refuse(func, str(mixes))
        return out

    def _refuse(self, func: Any, what: str) -> None:
        self.reason = self.reason or f"`{func._schema.name.removeprefix('aten::')}` {what}"
        raise _Mixes(self.reason)

    def judge_output(self, output: Any) -> str:
        """Returns why the function's result is not a row a position, "" if it is."""
        if not isinstance(output, torch.Tensor):
            return f"it returns a {type(output).__name__}, not a tensor"
        if tuple(output.shape[: len(self._leading)]) != self._leading or output.dim() <= len(self._leading):
            return f"it returns {list(output.shape)}, not a row for each of the positions {list(self._leading)}"
        try:
            rows = self._rows(output)
        except _Mixes as mixes:
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
            _Mixes: if it is a view over rows that does not take the same part of every row, in order.
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
            raise _Mixes("reads some positions and not others, or across them")
        step = 1
        for _, size, stride in sorted(rows, key=lambda r: r[2]):
            if stride != step:
                raise _Mixes("reads positions out of order")
            step *= size
        return tuple(rows)

    def _hold(self, output: torch.Tensor, rows: Rows) -> None:
        """Notes that a result holds rows, and checks that they lie as rows do."""
        row_bytes = max(output.numel() // self._num_rows, 1) * output.element_size()
        self._row_bytes.setdefault(_address(output), row_bytes)  # written in place, it has rows already
        if self._rows(output) != rows:
            raise _Mixes("gives a result in which a position's values do not lie together")

    # -- ops ------------------------------------------------------------------------------------------------------

    def _follow(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        name = func._schema.name.split("::")[-1]
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _Mixes("draws random numbers, which tiles would draw in another order")
        written = _written(func, args, kwargs)
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
            raise _Mixes("is not an op of PyTorch's own")
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
        raise _Mixes("is not known to keep positions apart")

    def _pointwise(self, operands: Sequence[torch.Tensor], output: torch.Tensor) -> Rows:
        found = {
            tuple((dim + output.dim() - t.dim(), size, step) for dim, size, step in self._rows(t))
            for t in operands
            if _address(t) in self._row_bytes
        }
        if len(found) != 1:
            raise _Mixes("reads values of different positions together")
        rows = found.pop()
        for tensor in operands:
            if _address(tensor) in self._row_bytes:
                continue
            for dim, _, _ in rows:
                own = dim - output.dim() + tensor.dim()
                if own >= 0 and tensor.shape[own] != 1:
                    raise _Mixes("reads a tensor with a value for each position that is not one of its arguments")
        return rows

    def _product(self, name: str, args: Any) -> Rows:
        at = _PRODUCTS[name]
        left, right = args[at], args[at + 1]
        rows, other = self._rows(left), self._rows(right)
        dims = [dim for dim, _, _ in rows]
        if not rows or left.dim() - 1 in dims:
            raise _Mixes("sums over positions")
        if other and not (other == rows and dims == [0] and left.dim() == 3):
            raise _Mixes("multiplies positions with each other")
        if left.dim() == 3 and 0 in dims and not other and right.stride(0) != 0 and right.shape[0] != 1:
            raise _Mixes("reads a tensor with a value for each position that is not one of its arguments")
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
            raise _Mixes("joins what depends on the positions with what does not")
        found = {self._rows(t) for t in tensors}
        if len(found) != 1:
            raise _Mixes("reads values of different positions together")
        rows = found.pop()
        at = (dim or 0) % output.dim()
        if name == "stack":
            return tuple((d + (at <= d), size, step) for d, size, step in rows)
        _inside(rows, at, output.dim())
        return rows

    def _same_for_all(self, items: Sequence[Any]) -> None:
        if any(isinstance(t, torch.Tensor) and _address(t) in self._row_bytes for t in items):
            raise _Mixes("reads values of different positions together")


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
        _Mixes: if one of them is a position.
    """
    given = [dims] if isinstance(dims, int) else dims
    if not given:
        raise _Mixes("works along all dimensions, positions included")
    found = [d % num_dims for d in given]
    if any(dim in found for dim, _, _ in rows):
        raise _Mixes("works along the positions")
    return found


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            item = args[position] if position < len(args) else kwargs.get(argument.name)
            found += _tensors((item,))
    return found


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(nest: Any) -> list[torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        return [nest]
    return [t for item in nest for t in _tensors(item)] if isinstance(nest, (list, tuple)) else []
