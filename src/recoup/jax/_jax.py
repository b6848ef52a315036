"""Every name of jax that is not public or differs between versions, one function each. Seen with 0.10.2, 0.12.0.1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

import jax

Literal = core.Literal
DropVar = core.DropVar
Jaxpr = Any
"""A jaxpr or closed jaxpr; from jax 0.11 on they begin to be one."""


def open_jaxpr(jaxpr: Jaxpr) -> tuple[Any, list[Any]]:
    """Returns a jaxpr and the values of its constants. Freed when both kinds of jaxpr are one."""
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
    consts = list(getattr(jaxpr, "consts", ()))
    return inner, consts if len(consts) == len(inner.constvars) else []


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Runs an equation again on `values`, with the context and the line it was traced with; returns all results."""
    params = eqn.primitive.get_bind_params(eqn.params)
    functions: Sequence[Any] = ()
    if isinstance(params, tuple):  # before 0.10: (functions, params)
        functions, params = params
    with at_line(eqn), eqn.ctx.manager:
        results = eqn.primitive.bind(*functions, *values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def at_line(eqn: Any) -> Any:
    """Returns a context in which traced equations get the source line of the user's equation."""
    from jax._src import source_info_util  # the user's line has no public way in

    return source_info_util.user_context(eqn.source_info.traceback)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Returns how many operands of a scan are constants and how many are its carry. Two numbers until jax 0.11.

    A `shard_map` is one step, with constants alone.
    """
    params = eqn.params
    if eqn.primitive.name == "shard_map":
        return len(eqn.invars), 0
    if "num_consts" in params:
        return int(params["num_consts"]), int(params["num_carry"])
    consts, carry, _ = params["ft_in"].update(range(len(eqn.invars))).unpack()
    return len(list(consts)), len(list(carry))


def over_shards(eqn: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` of shards as a function of whole arrays, mapped as a `shard_map` equation maps its own."""
    params = eqn.params
    return jax.shard_map(
        function,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )


def num_shards(eqn: Any) -> list[int]:
    """Returns for each result of an equation over how many devices it is known to be divided: its specs."""
    if eqn.primitive.name != "shard_map":
        return [1] * len(eqn.outvars)
    sizes = eqn.params["mesh"].shape
    axes = [
        [a for part in spec if part is not None for a in ((part,) if isinstance(part, str) else part)]
        for spec in eqn.params["out_specs"]
    ]
    return [math.prod(sizes[a] for a in names) for names in axes]


def has_effects(eqn: Any) -> bool:
    """Whether an equation does something besides its results. Reading a mesh's axis, as collectives do, is none."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def struct_of_type(aval: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of a value or its type, with its sharding where the mesh makes that part of its type."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None and isinstance(aval, jax.Array):  # what is traced knows its type's alone
        sharding = getattr(jax.typeof(aval), "sharding", None)
    axes = getattr(getattr(sharding, "mesh", None), "axis_types", None) or ()
    is_part = any(getattr(axis, "name", "") == "Explicit" for axis in axes)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype if dtype is None else dtype, sharding=sharding if is_part else None
    )


def source_line(eqn: Any) -> str:
    """Returns where the user's code made an equation, as `file.py:12 (function)`, "" if that is not known."""
    from jax._src import source_info_util  # no public name tells an equation's place

    text = str(source_info_util.summarize(eqn.source_info))
    return "" if text == "unknown" else text


def is_unspecified(sharding: Any) -> bool:
    """Whether a sharding in a `jit` equation's parameters says nothing."""
    return type(sharding).__name__ in ("UnspecifiedValue", "NoneType")


def compiled(function: Any, *args: Any) -> Any:
    """Returns a jitted function, compiled; on a CPU, XLA has to leave recomputation as it is.

    Args:
        function: what `jax.jit` returns. args: arrays or `jax.ShapeDtypeStruct`s; nothing is allocated.
    """
    options = {"xla_disable_hlo_passes": "cse_barrier_expander"} if jax.default_backend() == "cpu" else None
    return function.lower(*args).compile(compiler_options=options)


def is_on_host(aval: Any) -> bool:
    """Whether a value lies in host memory. `aval.memory_space` has no public name."""
    return getattr(getattr(aval, "memory_space", None), "name", "") == "Host"


def has_pinned_host() -> bool:
    """Whether the default backend has the memory that values are offloaded to."""
    return any(memory.kind == "pinned_host" for memory in jax.devices()[0].addressable_memories())


def is_inexact(dtype: Any) -> bool:
    """Whether a dtype is floating or complex; extended types (keys of random numbers) are not."""
    return bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact))


def newer_library_kernels() -> frozenset[str]:
    """Returns the primitives for which XLA's CPU backend calls its kernel library from jax 0.12 on, not with 0.10.2."""
    return frozenset(("sin", "cos", "tan")) if jax.__version_info__ >= (0, 11) else frozenset()
