"""Runs a segment's ops again: each that is needed once, in the order of the forward (`segments.py`, rule 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recoup import _torch
from recoup.errors import ReplayError
from recoup.runtime.rebuild.cheap_ops import op_facts
from recoup.runtime.rebuild.constant import Constant
from recoup.runtime.rebuild.kept import KeptCompact, changed_since, laid
from recoup.runtime.rebuild.op_forms import Noted
from recoup.runtime.rebuild.rederived import constant_of, fitted
from recoup.runtime.rebuild.rewriting import Rewriting, Versions
from recoup.runtime.rebuild.shortcuts import targets
from recoup.runtime.rebuild.values import Geometry, Made, Read, Value


def run_again(wanted: dict[Value, list[Geometry]], here: dict[Value, torch.Tensor]) -> dict[Value, torch.Tensor]:
    """Runs every op that leads to `wanted` once, in the order of the forward; returns their contents.

    Args:
        wanted: values, each with the geometries that it is wanted in.
        here: contents that are at hand; emptied as they are read for the last time.
    """
    versions: Versions[Value] = Versions(wanted)
    found = {value: here[value] for value in wanted if value in here}
    ops: dict[int, tuple[Made, list[Value]]] = {}
    uses: dict[Value, int] = {}
    stack = list(wanted)
    while stack:
        value = stack.pop()
        if value in here or value.constant is not None:
            continue
        if value.kept is not None and (kept := value.alive()) is not None:
            if type(kept) is KeptCompact:  # made anew when it is read
                versions.add(value)
            continue
        made = value.made
        if made is None:
            raise changed_since("a tensor that saved tensors are rebuilt from")
        if (known := ops.get(made.order)) is not None:
            if value not in known[1]:
                known[1].append(value)
            continue
        ops[made.order] = (made, [value])
        for read in made.values:
            num = uses.get(read, 0)
            uses[read] = num + 1
            if not num:
                stack.append(read)
    for order in sorted(ops):
        made, values = ops[order]
        writes = _writes_over(made, values, uses, versions)
        before = made.values[writes] if writes >= 0 else None
        out = _again(made, here, writes)
        for value in values:
            versions.add(value, before)
            assert value.base is not None
            tensor = out if type(out) is torch.Tensor else _result(out, value.output)
            if type(made) is not Noted or not made.form.gave(out):
                tensor = fitted(tensor, value.base)
            if value in uses:
                here[value] = tensor
            if value in wanted:
                found[value] = tensor
            del tensor
        del out
        for read in made.values:
            left = uses[read] = uses[read] - 1
            if not left:
                here.pop(read, None)
    for value in wanted:
        if value not in found:  # kept by somebody by now
            contents = _contents(value, here)
            found[value] = contents if value.base is None else laid(contents, value.base)
    return found


def _writes_over(made: Made, values: list[Value], uses: dict[Value, int], versions: Versions[Value]) -> int:
    """Returns the place among an op's reads of what it writes its result over: nobody reads that later. -1: none.

    Args:
        values: results of the op that are read or wanted.
    """
    if type(made) is Noted:
        over, part, geometries = made.form.targets, made.form.part, made.form.geometries
    else:
        geometries = tuple([read.geometry for read in made.reads])
        if type(made.function) is Rewriting:
            over, part = (0,), made.function.part
        else:
            over, part = _targets(made, geometries, values), geometries[0] if geometries else None
    for at in over:
        value = made.values[at]
        is_last = uses[value] == made.values.count(value) and geometries[at] == value.base
        if is_last and part is not None and versions.is_free(value, part):
            return at
    return -1


def _targets(made: Made, geometries: Sequence[Geometry], values: list[Value]) -> tuple[int, ...]:
    facts, num = op_facts(made.function), len(made.reads)
    leads = len(made.args) >= num and all(a is read for a, read in zip(made.args, made.reads, strict=False))
    base = values[0].base
    return targets(facts, geometries, made.kwargs, base) if leads and base is not None else ()


def _again(made: Made, here: dict[Value, torch.Tensor], writes: int) -> Any:
    """Runs an op again, over the tensor at the place `writes` among its reads if that is not -1."""
    if type(made) is Noted:
        tensors = []
        for value, geometry in zip(made.values, made.form.geometries, strict=True):
            tensor = here.get(value)
            if tensor is None:
                tensor = laid(_contents(value, here), geometry)
            elif geometry is not value.base:  # rebuilt, so that it lies as it did
                tensor = laid(tensor, geometry)
            tensors.append(tensor)
        return made.form.run(tensors, writes)
    args = _decoded(made.args, here)
    function = made.function
    facts = None if type(function) is Rewriting else op_facts(function)
    if writes >= 0:
        function = function.over if facts is None else facts.over
        if writes:
            args[:2] = args[1::-1]
    elif facts is not None and facts.again is not None:
        function = facts.again
    if made.kwargs:
        return function(*args, **{key: _decoded((item,), here)[0] for key, item in made.kwargs.items()})
    return function(*args)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a parameter has its memory now, and will in the segment's backward (not so under FSDP1 and ZeRO-3)."""
    if _torch.is_sharded_parameter(tensor):
        return False
    return tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0


def _decoded(items: Any, here: dict[Value, torch.Tensor]) -> list[Any]:
    """Returns an op's recorded arguments with tensors in the place of reads."""
    decoded: list[Any] = []
    for item in items:
        if type(item) is Read:
            value, geometry = item.value, item.geometry
            found = here.get(value)
            if found is None:
                decoded.append(laid(_contents(value, here), geometry))
            else:  # rebuilt, so that it lies as it did
                decoded.append(found if geometry == value.base else laid(found, geometry))
        elif isinstance(item, (list, tuple)):
            decoded.append(_decoded(item, here))
        else:
            decoded.append(item)
    return decoded


def _result(out: Any, position: int) -> torch.Tensor:
    """Returns one of the results of an op."""
    result: torch.Tensor = out[position] if isinstance(out, (tuple, list)) else out
    return result


def parameter_of(constant: Constant) -> torch.Tensor:
    """Returns the contents of a parameter; raises if it was changed or taken away since it was read."""
    parameter = constant.tensor
    if constant.copy is None and not has_memory(parameter):
        raise ReplayError(
            f"A parameter {list(parameter.shape)} that saved tensors are rebuilt from was taken away since "
            "its module's forward. Plan without `rebuild`: actions=('rederive', 'recompute').",
            code="E203",
        )
    return constant_of(constant)


def _contents(value: Value, here: dict[Value, torch.Tensor]) -> torch.Tensor:
    if value.constant is not None:
        return parameter_of(value.constant)
    found = here.get(value)
    if found is not None:
        return found
    kept = value.alive()
    if kept is None:
        raise changed_since("a tensor that saved tensors are rebuilt from")
    contents: torch.Tensor = kept.contents().detach()
    return contents
