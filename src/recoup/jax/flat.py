"""A jaxpr as a compiler sees it: calls inlined, equal ops merged, dead code left out, operands laid out for kernels."""

from __future__ import annotations

import math
from typing import Any

from recoup.jax._jax import DropVar, Literal, has_effects, open_jaxpr, scan_counts
from recoup.jax.flops import nbytes, result_bytes, sub_jaxprs, words

_INLINED = words(
    """jit pjit closed_call core_call core_closed_call eval_jaxpr checkpoint remat remat2 custom_jvp_call
    custom_vjp_call custom_vjp_call_jaxpr custom_lin"""
)
_RESHAPES = frozenset(("reshape", "squeeze", "expand_dims", "broadcast_in_dim"))
BARRIER = "optimization_barrier"


class Op:
    """One op after inlining: values by number, None for literals. With a name of its own where it is no equation."""

    __slots__ = ("eqn", "inputs", "name", "operands", "outputs")

    def __init__(self, eqn: Any, operands: list[int | None], outputs: list[int], name: str = "") -> None:
        self.eqn, self.operands, self.outputs = eqn, operands, outputs
        self.inputs = [n for n in operands if n is not None]
        self.name: str = name or eqn.primitive.name

    def carried(self) -> list[tuple[int | None, int]]:
        """Returns, for a loop, each value that its carry begins with and the one that it ends with."""
        if self.name == "scan":
            num_consts, num_carry = scan_counts(self.eqn)
            return list(zip(self.operands[num_consts:], self.outputs[:num_carry], strict=False))
        if self.name == "while":
            num_consts = self.eqn.params["cond_nconsts"] + self.eqn.params["body_nconsts"]
            return list(zip(self.operands[num_consts:], self.outputs, strict=True))
        return []

    def stacked(self) -> list[int]:
        """Returns, for a scan, the results that every step writes its part of."""
        return self.outputs[scan_counts(self.eqn)[1] :] if self.name == "scan" else []


class Flat:
    """A jaxpr inlined.

    Attributes:
        ops: in order. sizes, avals: bytes on a device and type of each value. arguments, results: their numbers.
    """

    def __init__(self, jaxpr: Any, num_sliced: int = 0) -> None:
        inner, _ = open_jaxpr(jaxpr)
        self.sizes: list[int] = []
        self.avals: list[Any] = []
        self.ops: list[Op] = []
        numbers: dict[Any, int | None] = {}
        self.arguments = [self._new(v, numbers) for v in (*inner.constvars, *inner.invars)]
        self._known: dict[Any, list[int]] = {}
        self._base: dict[int, int] = {}
        self._inline(inner, numbers)
        self.results = [n for v in inner.outvars if (n := self._read(v, numbers)) is not None]
        self._drop_dead_code()
        if num_sliced:
            self._slice(self.arguments[-num_sliced:])

    def _new(self, var: Any, numbers: dict[Any, int | None]) -> int:
        self.avals.append(var.aval)
        self.sizes.append(nbytes(var.aval))
        if not isinstance(var, DropVar):
            numbers[var] = len(self.sizes) - 1
        return len(self.sizes) - 1

    @staticmethod
    def _read(var: Any, numbers: dict[Any, int | None]) -> int | None:
        return None if isinstance(var, Literal) else numbers[var]

    def _inline(self, jaxpr: Any, numbers: dict[Any, int | None]) -> None:
        for eqn in jaxpr.eqns:
            inner = next(sub_jaxprs(eqn), None) if eqn.primitive.name in _INLINED else None
            operands = [self._read(v, numbers) for v in eqn.invars]
            if inner is None:
                self._step(eqn, operands, numbers)
                continue
            if eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
                operands = self._behind_barrier(eqn, operands)
            opened, _ = open_jaxpr(inner)
            inside: dict[Any, int | None] = {v: self._new(v, {}) for v in opened.constvars}
            inside.update(zip(opened.invars, operands, strict=True))
            self._inline(opened, inside)
            for var, result in zip(eqn.outvars, opened.outvars, strict=True):
                if not isinstance(var, DropVar):
                    numbers[var] = self._read(result, inside)

    def _slice(self, arguments: list[int]) -> None:
        """Lets arguments be slices of something larger, taken where they are first read."""
        waiting = set(arguments)
        ops: list[Op] = []
        for op in self.ops:
            first = [v for v in op.inputs if v in waiting]
            waiting.difference_update(first)
            ops += [Op(op.eqn, [], [value], name="dynamic_slice") for value in first]
            ops.append(op)
        self.ops = ops

    def _step(self, eqn: Any, operands: list[int | None], numbers: dict[Any, int | None]) -> None:
        """Adds an op, or takes the results of an equal one before it."""
        key = self._key(eqn, operands)
        known = self._known.get(key) if key is not None else None
        if known is None:
            known = [self._new(v, numbers) for v in eqn.outvars]
            self.sizes[len(self.sizes) - len(known) :] = result_bytes(eqn)
            self.ops.append(Op(eqn, self._laid_out(eqn, operands), known))
            if key is not None:
                self._known[key] = known
        else:
            numbers.update((v, n) for v, n in zip(eqn.outvars, known, strict=True) if not isinstance(v, DropVar))

    def _key(self, eqn: Any, operands: list[int | None]) -> Any:
        """Returns a key that equal ops on equal operands share; None for what is never merged."""
        (out, *_), value = eqn.outvars or [None], operands[0] if operands else None
        if value is not None and out is not None and eqn.primitive.name in _RESHAPES:
            is_view = nbytes(out.aval) == self.sizes[value] and out.aval.dtype == eqn.invars[0].aval.dtype
            if is_view:
                base = self._base[len(self.sizes)] = self._base.get(value, value)
                return "reshape", base, out.aval.shape
        return _same(eqn, operands)

    def _behind_barrier(self, eqn: Any, operands: list[int | None]) -> list[int | None]:
        """Returns other numbers for what enters a checkpoint's second run: nothing merges with the first one."""
        which = eqn.params["prevent_cse"]
        is_behind = [which] * len(operands) if isinstance(which, bool) else which
        held = [v for v, behind in zip(operands, is_behind, strict=True) if v is not None and behind]
        again = {v: self._like(v) for v in dict.fromkeys(held)}
        self.ops.append(Op(eqn, list(again), list(again.values()), name=BARRIER))
        pairs = zip(operands, is_behind, strict=True)
        return [again[v] if v is not None and behind else v for v, behind in pairs]

    def _like(self, value: int) -> int:
        """Returns the number of a new value of the same type."""
        self.avals.append(self.avals[value])
        self.sizes.append(self.sizes[value])
        return len(self.sizes) - 1

    def _laid_out(self, eqn: Any, operands: list[int | None]) -> list[int | None]:
        """Returns operands of a product or convolution in the order and number of dimensions that a kernel reads."""
        found = list(operands)
        for i, (name, order) in enumerate(layouts(eqn)):
            value = operands[i]
            if not name or value is None:
                continue
            key = (name, value, order)
            if key not in self._known:
                self._known[key] = [self._like(value)]
                self.ops.append(Op(eqn, [value], self._known[key], name=name))
            found[i] = self._known[key][0]
        return found

    def _drop_dead_code(self) -> None:
        needed = set(self.results)
        kept = []
        for op in reversed(self.ops):
            if has_effects(op.eqn) or any(v in needed for v in op.outputs):
                needed.update(op.inputs)
                kept.append(op)
        self.ops = kept[::-1]


def _same(eqn: Any, operands: list[int | None]) -> Any:
    """Returns a key that equal ops on equal operands share; None for what is never merged."""
    if has_effects(eqn) or next(sub_jaxprs(eqn), None) is not None or eqn.primitive.name.startswith("random"):
        return None
    values = tuple(
        (v.val.item() if getattr(v.val, "ndim", 0) == 0 and hasattr(v.val, "item") else id(v.val), str(v.aval))
        if isinstance(v, Literal)
        else n
        for v, n in zip(eqn.invars, operands, strict=True)
    )
    key = (eqn.primitive.name, values, tuple(eqn.params.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def live_eqns(jaxpr: Any) -> list[Any]:
    """Returns the equations of a jaxpr, or of a `Flat`, that run: calls inlined, dead code left out."""
    flat = jaxpr if isinstance(jaxpr, Flat) else Flat(jaxpr)
    return [op.eqn for op in flat.ops if op.name == op.eqn.primitive.name != BARRIER]


Layout = tuple[str, tuple[int, ...]]


def layouts(eqn: Any) -> tuple[Layout, ...]:
    """Returns for each operand of a product or convolution what lays it out for a kernel, and its dimensions' order.

    "transpose" copies it, "reshape" merges neighbouring dimensions, "" leaves it. XLA's CPU kernels read products as
    [batch, rows, inner] x [batch, inner, columns], each matrix in either order of its two dimensions, and convolutions
    as [batch, *space, features] with kernels [*space, inner, outer].
    """
    if eqn.primitive.name == "dot_general":
        contracted, batch = eqn.params["dimension_numbers"]
        avals = [v.aval for v in eqn.invars]
        free = [
            tuple(d for d in range(a.ndim) if d not in (*c, *b))
            for c, b, a in zip(contracted, batch, avals, strict=True)
        ]
        leads = [tuple(b) == tuple(range(len(b))) for b in batch]
        is_matrix = [lead and len(c) == 1 and len(f) <= 1 for lead, c, f in zip(leads, contracted, free, strict=True)]
        if all(is_matrix):
            return ()
        orders = (*batch[0], *free[0], *contracted[0]), (*batch[1], *contracted[1], *free[1])
        return tuple(
            ("", ()) if fits else _moved(order, aval)
            for fits, order, aval in zip(is_matrix, orders, avals, strict=True)
        )
    if eqn.primitive.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        (n, f, *space), (o, i, *kernel) = numbers.lhs_spec, numbers.rhs_spec
        orders = (n, *space, f), (*kernel, i, o)
        found = (_moved(order, v.aval) for order, v in zip(orders, eqn.invars, strict=True))
        return tuple(layout if layout[0] == "transpose" else ("", ()) for layout in found)
    return ()


def _moved(order: tuple[int, ...], aval: Any) -> Layout:
    moved = [d for d in order if aval.shape[d] != 1]
    return ("reshape", ()) if moved == sorted(moved) else ("transpose", order)


def is_row_major_product(eqn: Any) -> bool:
    """Whether a product of matrices, its operands laid out, is of [rows, inner] and [inner, columns] as they lie."""
    (left, right), (_, batch) = eqn.params["dimension_numbers"]
    a, b = (v.aval for v in eqn.invars)
    copied = [name != "" for name, _ in layouts(eqn)] or [False, False]
    inner = math.prod(a.shape[d] for d in left)
    together = math.prod(b.shape[d] for d in batch)
    rows, columns = (math.prod(v.shape) // max(inner * together, 1) for v in (a, b))
    in_order = (copied[0] or tuple(left) == (a.ndim - 1,)) and (copied[1] or tuple(right) == (len(batch),))
    return in_order and min(rows, columns) > 1
