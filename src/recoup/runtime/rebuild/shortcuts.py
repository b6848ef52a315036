"""Rebuilding a result for less than its op cost the first time, bit for bit.

- *In place*: the last reader of a rebuilt intermediate may write over it, which saves traffic and the transient.
- *BatchNorm from its statistics*: in training the op finds mean and variance and then applies them. The node keeps the
  mean and the reciprocal deviation; on the CPU the second half, which is the op in evaluation, can run alone. Both
  multiply by `reciprocal deviation * weight`, so that product goes in as the weight of a distribution of variance one.
- *Max-pooling from its indices*: the CPU's kernel costs as much as sixteen copies, a gather two. The indices are
  autograd's anyway; they are kept in four bytes each instead of eight.
- *A dropout mask from what it was scaled to*: zeros and ones are one byte each. That they can be told apart in the
  product is tried on a zero and a one with the op's own numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recoup import _torch
from recoup.runtime import execution_context
from recoup.runtime.rebuild.cheap_ops import OpFacts
from recoup.runtime.rebuild.values import Geometry, Made, Read, Value, geometry_of


def targets(facts: OpFacts, reads: Sequence[Geometry], kwargs: dict[str, Any], result: Geometry) -> tuple[int, ...]:
    """Returns which of the tensors that an elementwise op reads it can write its result over, by place.

    Args:
        facts: of the functional overload.
        reads: geometries of its tensors, which have to be its first arguments.
        result: how the op's result lay the first time; an integer times 0.5, say, is no integer.
    """
    if facts.over is None or not 1 <= len(reads) <= 2 or reads[0] != result:
        return ()
    if len(reads) == 1:
        return (0,)
    size, stride, offset, dtype = reads[1]
    if (size, stride, dtype) != (result[0], result[1], result[3]):
        return ()
    is_second = facts.commutes and kwargs.get("alpha", 1) == 1 and offset == result[2]
    return (0, 1) if is_second else (0,)


def call_over(
    facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], *, spare: Sequence[Any], result: Geometry
) -> Any | None:
    """Runs an elementwise op in place over one of its arguments, if that is in `spare` and has the result's geometry.

    Args:
        facts: of the functional overload.
        spare: tensors that nobody reads after this op.
        result: how the op's result lay the first time; an integer times 0.5, say, is no integer.

    Returns:
        The result, or None: nothing was run.
    """
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    if any(t is not arg for t, arg in zip(tensors, args, strict=False)):
        return None
    for place in targets(facts, [geometry_of(t) for t in tensors], kwargs, result):
        if any(tensors[place] is t for t in spare):
            return facts.over(*(args[1::-1] if place else args[:2]), *args[2:], **kwargs)  # type: ignore[misc]
    return None


def has_shortcut(facts: OpFacts, args: Sequence[Any]) -> bool:
    """Whether the op's first result can be had from its others."""
    return (facts.is_batch_norm and bool(args[5])) or facts.pooled_dims > 0


def from_side_results(facts: OpFacts, args: Sequence[Any], side_results: Sequence[torch.Tensor]) -> Any | None:
    """Returns the op's results, of which only the first counts, or None where it has to run.

    Args:
        args: the op's own.
        side_results: its results but the first, as it returned them.
    """
    if facts.is_batch_norm:
        out = batch_norm_applied(args, side_results[0], side_results[1])
    else:
        out = max_pool_gathered(args[0], side_results[0], facts.pooled_dims)
    return None if out is None else (out, *side_results)


def keeps_indices(facts: OpFacts, args: Sequence[Any], output: int, tensor: torch.Tensor) -> bool:
    """Whether these are indices of a max-pooling to keep rather than find again: on the CPU, fewer than 2**31."""
    return (
        facts.pooled_dims > 0
        and output == 1
        and execution_context.device_type(tensor) == "cpu"
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
        and args[0].geometry[0].numel() < 2**31
    )


def shown_mask(value: Value, geometry: Geometry) -> Value | None:
    """Returns the random mask of which a value tells the ones from the zeros by `!= 0`, None if it does not.

    It is the result of one op of the mask and numbers, which is tried on a zero and a one: with a scale of zero, or one
    that underflows, it does not.

    Args:
        geometry: of the tensor that is saved, which has to be the whole value.
    """
    made = value.made
    if (
        type(made) is not Made
        or len(made.reads) != 1
        or not made.reads[0].value.random_mask
        or geometry[3] == torch.bool
    ):
        return None
    read, dtype = made.reads[0], geometry[3]
    mask, base = read.value, read.value.base
    if base is None or read.geometry != base or base[0] != geometry[0] or value.base != geometry:
        return None
    if made.function._schema.name not in ("aten::div", "aten::mul") or not made.is_flat:
        return None
    with _torch.without_dispatch_modes():
        zero_and_one = torch.tensor([0.0, 1.0]).to(base[3])
        out = made.function(*(zero_and_one if type(a) is Read else a for a in made.args))
        if out.dtype != dtype:
            return None
        zero, one = out.double().tolist()
    least = torch.finfo(dtype).tiny if dtype.is_floating_point else 1
    return mask if zero == 0 and not abs(one) < least else None  # a denormal may be flushed to zero on another device


def max_pool_gathered(x: torch.Tensor, indices: torch.Tensor, pooled_dims: int) -> torch.Tensor | None:
    """Returns max-pooling's output from the positions it found, each within its own plane."""
    if execution_context.device_type(x) != "cpu" or not x.is_contiguous():
        return None
    return x.flatten(-pooled_dims).gather(-1, indices.flatten(-pooled_dims)).view_as(indices)


def batch_norm_applied(
    args: Sequence[Any], mean: torch.Tensor, reciprocal_deviation: torch.Tensor
) -> torch.Tensor | None:
    """Returns BatchNorm's output in training, from the statistics it left; None if that cannot be had bit for bit.

    Args:
        args: of `native_batch_norm`: input, weight, bias, two unused, training, momentum, eps.
        mean: shape (channels,), as the op returned it.
        reciprocal_deviation: likewise.
    """
    x, weight, bias = args[:3]
    if not can_apply_statistics(args, mean):
        return None
    scale = reciprocal_deviation if weight is None else reciprocal_deviation * weight
    one = torch.ones_like(mean)
    out: torch.Tensor = torch.native_batch_norm(x, scale, bias, mean, one, False, 0.0, 0.0)[0]
    return out


def can_apply_statistics(args: Sequence[Any], mean: torch.Tensor, *, device_type: str = "") -> bool:
    """Whether `batch_norm_applied` gives the bits of the op in training.

    Args:
        args, mean: as there. device_type: of a tensor without memory.
    """
    x, *affine = args[:3]
    if (device_type or execution_context.device_type(x)) != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return False
    return all(t is None or t.dtype == x.dtype for t in (*affine, mean)) and _is_dense(x)


def _is_dense(x: torch.Tensor) -> bool:
    """Whether the kernel folds the statistics into one scale and shift a channel: in these layouts alone."""
    if x.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])
