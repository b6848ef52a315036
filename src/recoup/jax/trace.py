"""From a user's step to a program: arguments flattened, non-arrays set aside, the step traced once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

import jax
from recoup.errors import PlanMismatch, StepError, UsageError
from recoup.jax._jax import struct_of_type
from recoup.jax.linear import is_differentiable, reads_of
from recoup.jax.program import Program


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """A traced loss function.

    Attributes:
        name: of the function. function: the user's, from array leaves to flat results. program: what it does.
        structure: pytree of its arguments. is_array: for each leaf, whether it is one. fixed: the leaves that are none.
        avals: of those that are.
        differentiated: positions, among the array leaves, of those that gradients are asked of.
        result: pytree of its result. active: values that carry a derivative. shard_bytes: of each array, on a device.
    """

    name: str
    function: Callable[[Sequence[Any]], list[Any]]
    program: Program
    structure: Any
    is_array: tuple[bool, ...]
    fixed: tuple[Any, ...]
    avals: tuple[Any, ...]
    differentiated: tuple[int, ...]
    result: Any
    has_aux: bool
    active: frozenset[int]
    shard_bytes: tuple[int, ...]

    def arrays_of(self, args: Sequence[Any]) -> list[Any]:
        """Returns the array leaves of `args`.

        Raises:
            PlanMismatch: if they are not those the step was traced with.
        """
        leaves, structure = jax.tree.flatten(tuple(args))
        if structure != self.structure:
            raise PlanMismatch(
                f"`{self.name}` was planned for arguments of the structure {self.structure}; these have {structure}. "
                "Plan again for them."
            )
        arrays = [leaf for leaf, is_array in zip(leaves, self.is_array, strict=True) if is_array]
        for i, (array, aval) in enumerate(zip(arrays, self.avals, strict=True)):
            if np.shape(array) != aval.shape or jax.dtypes.result_type(array) != aval.dtype:
                found = f"{jax.dtypes.result_type(array)}{list(np.shape(array))}"
                raise PlanMismatch(
                    f"`{self.name}` was planned for {aval.dtype}{list(aval.shape)} as its array argument {i}; this one "
                    f"is {found}. Plan again for these shapes."
                )
        return arrays


def is_array(leaf: Any) -> bool:
    """Whether a leaf is traced; everything else (flags, functions, strings) is part of the step."""
    if isinstance(leaf, (bool, str, bytes)) or leaf is None:
        return False
    return isinstance(leaf, (int, float, complex, np.ndarray, np.generic)) or (
        hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    )


def holds_arrays(args: Sequence[Any]) -> bool:
    """Whether arguments are values to run on, not shapes."""
    arrays = [leaf for leaf in jax.tree.leaves(tuple(args)) if is_no_number(leaf)]
    return bool(arrays) and not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in arrays)


def is_no_number(leaf: Any) -> bool:
    """Whether a leaf is traced where Python's own numbers are not."""
    return is_array(leaf) and not isinstance(leaf, (int, float, complex))


def struct_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of a leaf, and its sharding where that is part of its type or all there is."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if isinstance(leaf, (int, float, complex, np.ndarray, np.generic)):
        return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf))
    return struct_of_type(leaf)


def _shard_bytes(leaf: Any) -> int:
    """Returns the bytes of a leaf on one device."""
    struct = struct_of(leaf)
    shape, sharding = struct.shape, getattr(leaf, "sharding", None)
    if sharding is not None and hasattr(sharding, "shard_shape"):
        shape = sharding.shard_shape(tuple(shape))
    itemsize = getattr(struct.dtype, "itemsize", 1)
    return int(np.prod(shape, dtype=np.int64)) * int(itemsize)


def trace(
    step: Callable[..., Any], args: Sequence[Any], argnums: int | Sequence[int], *, has_aux: bool, is_loss: bool = True
) -> Step:
    """Returns the traced step.

    Args:
        step: returns a scalar loss, or with `has_aux` a pair of it and anything else.
        args: its arguments: arrays, or `jax.ShapeDtypeStruct`s. argnums: which of them gradients are asked of.
        has_aux: whether it returns a pair. is_loss: whether to check that, and what gradients are asked of.

    Raises:
        UsageError: if `argnums` names no argument, or none that can have a gradient.
        StepError: if the step fails on these arguments, or returns no scalar.
    """
    name = getattr(step, "__name__", type(step).__name__)
    if not callable(step):
        raise UsageError(f"step={step!r} cannot be called. Give the loss function.")
    chosen = [argnums] if isinstance(argnums, int) else argnums
    if isinstance(chosen, str) or not isinstance(chosen, Iterable) or not all(isinstance(n, int) for n in chosen):
        raise UsageError(f"argnums={argnums!r}: give a number, or several, of the arguments of `{name}` to derive for.")
    if not args:
        raise UsageError(f"No arguments were given for `{name}`. Give arrays or jax.ShapeDtypeStructs behind it.")
    wanted: set[int] = {n if n >= 0 else n + len(args) for n in chosen}
    if not wanted or min(wanted) < 0 or max(wanted) >= len(args):
        raise UsageError(
            f"argnums={argnums!r} names no argument of `{name}`: {len(args)} were given. "
            f"Name one of 0 to {len(args) - 1}."
        )
    try:
        return _trace(step, name, args, wanted, is_array, has_aux=has_aux, is_loss=is_loss)
    except StepError:
        if not any(isinstance(leaf, (int, float, complex)) for leaf in jax.tree.leaves(tuple(args))):
            raise
    # Numbers may be settings that the step compares (a dropout's rate): then they are part of it.
    return _trace(step, name, args, wanted, is_no_number, has_aux=has_aux, is_loss=is_loss)


def _trace(
    step: Callable[..., Any],
    name: str,
    args: Sequence[Any],
    wanted: set[int],
    is_array: Callable[[Any], bool],
    *,
    has_aux: bool,
    is_loss: bool,
) -> Step:
    leaves, structure = jax.tree.flatten(tuple(args))
    owner = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    arrays = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    structs = [struct_of(leaves[i]) for i in arrays]

    def flat(*values: Any) -> Any:
        filled = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            filled[i] = value
        return step(*jax.tree.unflatten(structure, filled))

    try:
        jaxpr, shape = jax.make_jaxpr(flat, return_shape=True)(*structs)
    except Exception as error:
        raise StepError(f"`{name}` fails on these arguments: {type(error).__name__}: {error}") from error
    if is_loss:
        _check_result(name, shape, has_aux=has_aux)
    program = Program(jaxpr)
    differentiated = [p for p, i in enumerate(arrays) if owner[i] in wanted and is_differentiable(structs[p])]
    if not differentiated and is_loss:
        raise UsageError(
            f"No array of argument {sorted(wanted)} of `{name}` can have a gradient: none is floating. Set argnums."
        )
    return Step(
        name=name,
        function=lambda values: jax.tree.leaves(flat(*values)),
        program=program,
        structure=structure,
        is_array=tuple(is_array(leaf) for leaf in leaves),
        fixed=tuple(leaf for leaf in leaves if not is_array(leaf)),
        avals=tuple(structs),
        differentiated=tuple(differentiated),
        result=jax.tree.structure(shape),
        has_aux=has_aux,
        active=active_values(program, [program.inputs[p] for p in differentiated], program.outputs[:1])
        if is_loss
        else frozenset(),
        shard_bytes=tuple(_shard_bytes(leaves[i]) for i in arrays),
    )


def on_one_device(
    step: Callable[..., Any], args: Sequence[Any], argnums: int | Sequence[int], *, has_aux: bool, traced: Step
) -> Step:
    """Returns a step as one device runs it: on its shard of what no gradient is asked of (the batch), weights whole.

    It is `traced` itself where nothing such is sharded, where the step maps over shards itself (`shard_map`), or where
    on a shard it does not do the same ops.
    """
    leaves, structure = jax.tree.flatten(tuple(args))
    arrays = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    chosen = {arrays[p] for p in traced.differentiated}
    local = list(leaves)
    for i in arrays:
        sharding = getattr(leaves[i], "sharding", None)
        if sharding is not None and hasattr(sharding, "shard_shape"):
            whole = tuple(leaves[i].shape)
            local[i] = jax.ShapeDtypeStruct(whole if i in chosen else sharding.shard_shape(whole), leaves[i].dtype)
    kinds = [unit.kind for unit in traced.program.units]
    is_whole = all(np.shape(local[i]) == np.shape(leaves[i]) for i in arrays)
    if is_whole or "shard_map" in kinds:
        return traced
    try:
        found = trace(step, jax.tree.unflatten(structure, local), argnums, has_aux=has_aux)
    except StepError:
        return traced
    return found if [unit.kind for unit in found.program.units] == kinds else traced


def _check_result(name: str, shape: Any, *, has_aux: bool) -> None:
    is_pair = isinstance(shape, (tuple, list)) and len(shape) == 2
    leaves = jax.tree.leaves(shape[0] if has_aux and is_pair else shape)
    is_scalar = len(leaves) == 1 and leaves[0].shape == () and jax.numpy.issubdtype(leaves[0].dtype, jax.numpy.floating)
    if not is_scalar or (has_aux and not is_pair):
        found = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves[:3]) or "nothing"
        hint = (
            " If it returns a pair of loss and something else, set has_aux=True. Of a whole training step, give the "
            "loss, and let the step derive the planned one."
        )
        if has_aux:
            hint = " With has_aux=True, a pair of it and anything else."
        raise StepError(f"`{name}` has to return a floating scalar, the loss; it returns {found}.{hint}")


def active_values(program: Program, inputs: Sequence[int], results: Sequence[Any]) -> frozenset[int]:
    """Returns the values that backward has a cotangent of: they depend on `inputs`, and `results` on them."""
    active = set(inputs)
    handing_on = []
    for unit in program.units:
        carrying = [i for i, o in enumerate(unit.operands) if isinstance(o, int) and o in active]
        if carrying:
            found = {unit.outputs[i] for i in reads_of(unit, carrying).active}
            active |= found
            handing_on.append(([o for i in carrying if isinstance(o := unit.operands[i], int)], found))
    asked = {o for o in results if isinstance(o, int)}
    for operands, found in reversed(handing_on):
        if not asked.isdisjoint(found):  # what only a `stop_gradient` reads is not asked for
            asked.update(operands)
    return frozenset(active & asked)


def loss_function(step: Step, run: Callable[[Sequence[Any]], list[Any]], *, scale: float = 1.0) -> Callable[..., Any]:
    """Returns the loss, and what else the step returns, as a function of the differentiated leaves and of all."""

    def loss(chosen: Sequence[Any], values: Sequence[Any]) -> Any:
        filled = list(values)
        for position, value in zip(step.differentiated, chosen, strict=True):
            filled[position] = value
        results = run(filled)
        return results[0] if scale == 1.0 else results[0] * scale, results[1:]

    return loss


def gradient_function(
    step: Step,
    run: Callable[[Sequence[Any]], list[Any]],
    *,
    scale: float = 1.0,
    on_residuals: Callable[[Collection[Any]], None] | None = None,
) -> Callable[..., Any]:
    """Returns loss and gradients as a function of the step's array leaves.

    Args:
        step: the traced step. run: returns its flat results for its array leaves, planned or plain.
        scale: what the loss is multiplied with. on_residuals: is given what forward keeps for backward.
    """
    loss = loss_function(step, run, scale=scale)

    def both(*values: Any) -> Any:
        chosen = [values[p] for p in step.differentiated]
        result, pull, others = jax.vjp(lambda chosen: loss(chosen, values), chosen, has_aux=True)
        if on_residuals is not None:
            arguments = {id(v) for v in values}
            on_residuals({id(r): r for r in jax.tree.leaves(pull) if id(r) not in arguments}.values())
        return (result, others), pull(jax.numpy.ones_like(result))[0]

    return both
