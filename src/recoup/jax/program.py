"""A traced step as a list of units: its equations, with calls of `jit` inlined, and values by number.

A unit is what a plan speaks of: it may be run again, and its results may be held. Loops, conditionals and functions
with a derivative of their own (`custom_jvp`, `custom_vjp`) are one unit each; the body of a scan or `shard_map` is a
program again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from recoup.jax._jax import DropVar, Literal, is_unspecified, open_jaxpr
from recoup.jax.flops import eqn_flops, nbytes, result_bytes

_INLINED = frozenset(("jit", "pjit", "closed_call", "core_call", "core_closed_call", "eval_jaxpr"))
USER_NAME = "name"  # the primitive behind `jax.ad_checkpoint.checkpoint_name`


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unit:
    """One equation.

    Attributes:
        index: its place in the program. eqn: what it is. operands: for each of its inputs a value's number, or a
            literal. outputs: numbers of its results.
    """

    index: int
    eqn: Any
    operands: tuple[Any, ...]
    outputs: tuple[int, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        """The values it reads, each once."""
        return tuple(dict.fromkeys(o for o in self.operands if isinstance(o, int)))

    @property
    def num_steps(self) -> int:
        """How often its body runs: a scan's length; 1 for all else."""
        return int(self.eqn.params["length"]) if self.kind == "scan" else 1

    @property
    def kind(self) -> str:
        """The primitive's name."""
        return str(self.eqn.primitive.name)


class Program:
    """Units in order.

    Attributes:
        scope: prefix of the names of its values; "" for the step, "3/" for the body of its unit 3.
        avals: shape and dtype of each value. inputs: numbers of the arguments. consts: number and value of constants.
        units: in order. outputs: for each result a value's number, or a literal.
    """

    def __init__(self, jaxpr: Any, scope: str = "") -> None:
        self.scope = scope
        self.avals: list[Any] = []
        self._bytes: list[int] = []
        self.units: list[Unit] = []
        inner, consts = open_jaxpr(jaxpr)
        numbers: dict[Any, Any] = {}
        const_numbers = [self._number(v, numbers) for v in inner.constvars]
        self.consts = list(zip(const_numbers, consts, strict=True))
        self.inputs = tuple(self._number(v, numbers) for v in inner.invars)
        self._inline(inner, numbers)
        self.outputs = tuple(self._read(v, numbers) for v in inner.outvars)
        self.maker = {v: u.index for u in self.units for v in u.outputs}
        self.results = frozenset(o for o in self.outputs if isinstance(o, int))
        last_read: dict[int, int] = dict.fromkeys(self.results, len(self.units))
        for unit in reversed(self.units):
            for value in unit.inputs:
                last_read.setdefault(value, unit.index)
        self.last_read = last_read

    def _number(self, var: Any, numbers: dict[Any, Any]) -> int:
        self.avals.append(var.aval)
        self._bytes.append(nbytes(var.aval))
        if not isinstance(var, DropVar):
            numbers[var] = len(self.avals) - 1
        return len(self.avals) - 1

    @staticmethod
    def _read(var: Any, numbers: dict[Any, Any]) -> Any:
        return var if isinstance(var, Literal) else numbers[var]

    def _inline(self, jaxpr: Any, numbers: dict[Any, Any]) -> None:
        for eqn in jaxpr.eqns:
            operands = tuple(self._read(v, numbers) for v in eqn.invars)
            inner = _inlined(eqn)
            if inner is None:
                outputs = tuple(self._number(v, numbers) for v in eqn.outvars)
                self._bytes[len(self._bytes) - len(outputs) :] = result_bytes(eqn)
                self.units.append(Unit(index=len(self.units), eqn=eqn, operands=operands, outputs=outputs))
                continue
            inside = dict(zip(inner.invars, operands, strict=True))
            self._inline(inner, inside)
            for var, result in zip(eqn.outvars, inner.outvars, strict=True):
                if not isinstance(var, DropVar):
                    numbers[var] = self._read(result, inside)

    def name(self, value: int) -> str:
        """Returns the name of a value: the user's own if it has one, else its unit's number and primitive."""
        unit = self.units[self.maker[value]]
        if value in self.user_names:
            return self.user_names[value]
        which = unit.outputs.index(value)
        return f"{self.scope}{unit.index}.{unit.kind}" + (f".{which}" if which else "")

    def nbytes(self, value: int) -> int:
        """Returns the bytes of a value on a device."""
        return self._bytes[value]

    @functools.cached_property
    def user_names(self) -> dict[int, str]:
        """The user's own names: of the values that carry one, and of what was given it."""
        named = {u: str(u.eqn.params["name"]) for u in self.units if u.kind == USER_NAME}
        return {v: name for u, name in named.items() for v in (*u.inputs, *u.outputs) if v in self.maker}

    @functools.cached_property
    def bodies(self) -> dict[int, Program]:
        """The bodies of the scans and `shard_map`s among the units, by unit."""
        return {
            u.index: Program(u.eqn.params["jaxpr"], f"{self.scope}{u.index}/")
            for u in self.units
            if u.kind in ("scan", "shard_map")
        }

    def entering(self, first: int, last: int) -> tuple[int, ...]:
        """Returns the values that units [first, last) read and do not make, in order of their numbers."""
        units = self.units[first:last]
        made = {v for u in units for v in u.outputs}
        return tuple(sorted({v for u in units for v in u.inputs} - made))

    def leaving(self, first: int, last: int) -> tuple[int, ...]:
        """Returns the values that units [first, last) make and others read later, in order."""
        made = (v for u in self.units[first:last] for v in u.outputs)
        return tuple(v for v in made if self.last_read.get(v, -1) >= last)

    def flops(self, first: int = 0, last: int | None = None) -> int:
        """Returns the FLOPs of units [first, last)."""
        return sum(eqn_flops(u.eqn) for u in self.units[first:last])


def _inlined(eqn: Any) -> Any:
    """Returns the jaxpr to put in place of an equation, None if it stays: a call that says nothing of shardings."""
    if eqn.primitive.name not in _INLINED:
        return None
    shardings: Sequence[Any] = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    opened, consts = open_jaxpr(inner)
    return None if consts or opened.constvars or not all(map(is_unspecified, shardings)) else opened
