"""What an op was when it ran: enough to note that it runs once more on tensors that lie as they did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.runtime.rebuild.cheap_ops import OpFacts
from recoup.runtime.rebuild.op_function import OpFunction
from recoup.runtime.rebuild.rewriting import Rewriting
from recoup.runtime.rebuild.shortcuts import targets
from recoup.runtime.rebuild.values import PLAIN, Made, Value, geometry_of


class OpForm:
    """One op of a call, with its scalars.

    Attributes:
        op: runs it. first: whether its tensors come first, and none is in a list. rest: its arguments, without the
            tensors where those come first, else with `TENSOR` in their place. kwargs: its own, in the same way.
        geometries: of the tensors it read, in order. bases: geometries of the results that are recorded, by position.
        is_single: it returns one tensor. is_cast: it copies a tensor to another dtype.
        targets: places of the tensors that it may write its result over, if nobody reads them later. over: does that,
            to the first. part: geometry of what it writes over.
        gives_again: says whether results lie as they did, when it runs again; found on the first time.
    """

    __slots__ = (
        "bases",
        "first",
        "geometries",
        "gives_again",
        "is_cast",
        "is_single",
        "kwargs",
        "op",
        "over",
        "part",
        "rest",
        "targets",
    )

    def __init__(
        self,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        recorded: list[tuple[int, torch.Tensor]],
        tensors: list[torch.Tensor],
    ) -> None:
        self.op = OpFunction(facts.again or facts.overload)
        num = len(tensors)
        self.first = all(item is tensor for item, tensor in zip(args, tensors, strict=False)) and num <= len(args)
        self.rest = args[num:] if self.first else _without_tensors(args)
        self.kwargs = {key: _without_tensors((item,))[0] for key, item in kwargs.items()}
        self.geometries = tuple([geometry_of(tensor) for tensor in tensors])
        self.bases = tuple([(position, geometry_of(t)) for position, t in recorded])
        self.is_cast = facts.label == "aten._to_copy.default"
        self.is_single = type(out) is torch.Tensor
        self.gives_again: Callable[..., bool] | None = None
        self.targets: tuple[int, ...] = ()
        self.over: OpFunction | None = None
        self.part = self.geometries[0] if tensors else None
        if self.first and self.is_single and self.bases:
            self.targets = targets(facts, self.geometries, kwargs, self.bases[0][1])
            self.over = OpFunction(facts.over) if self.targets else None

    def run(self, tensors: list[torch.Tensor], writes: int = -1) -> Any:
        """Runs the op again on tensors that lie as the first time.

        Args:
            writes: place of the one that it writes over, -1 for none.
        """
        call = self.op.call
        if writes >= 0:
            assert self.over is not None
            call = self.over.call
            if writes:
                tensors = tensors[::-1]
        if self.first:
            return call(*tensors, *self.rest, **self.kwargs) if self.kwargs else call(*tensors, *self.rest)
        each = iter(tensors)
        args = with_tensors(self.rest, each)
        return call(*args, **{key: with_tensors((item,), each)[0] for key, item in self.kwargs.items()})

    def gave(self, out: Any) -> bool:
        """Whether results lie as they did the first time."""
        outs = (out,) if self.is_single else out
        if self.gives_again is None:
            if not all([geometry_of(outs[position]) == base for position, base in self.bases]):
                return False
            self.gives_again = _torch.tensor_guard(outs)
        if self.gives_again is None or not self.gives_again(*outs):
            return False
        return all([outs[position].storage_offset() == base[2] for position, base in self.bases])


class _Tensor:
    """Stands for a tensor among an op's arguments."""


TENSOR = _Tensor()


def form_of(
    facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, recorded: list[tuple[int, torch.Tensor]]
) -> OpForm | None:
    """Returns the form of an op that was recorded; None if its arguments are of kinds that take a closer look.

    Args:
        recorded: results whose making was recorded, with their positions.
    """
    tensors: list[torch.Tensor] = []
    outs = out if type(out) is tuple else (out,)
    if not recorded or any(type(t) is not torch.Tensor for t in outs):
        return None
    if not _collect(args, tensors) or not _collect(kwargs.values(), tensors):
        return None
    return OpForm(facts, args, kwargs, out, recorded, tensors)


def form_of_rewriting(
    facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: torch.Tensor, value: Value
) -> OpForm | None:
    """Returns the form of an op that wrote to a part of a storage; None as of `form_of`.

    Args:
        tensor: it wrote to this, its first argument. value: of the whole storage after it.
    """
    assert value.made is not None and value.base is not None
    form = form_of(facts, args, kwargs, tensor, [(0, tensor)])
    if form is not None:
        rewriting = value.made.function
        assert type(rewriting) is Rewriting
        form.op, form.over = OpFunction(rewriting), OpFunction(rewriting.over)
        form.part, form.targets = rewriting.part, (0,)
        form.geometries = (value.base, *form.geometries[1:])
        form.bases = ((0, value.base),)
    return form


def _collect(items: Iterable[Any], tensors: list[torch.Tensor]) -> bool:
    """Adds the tensors among arguments; whether all of these are tensors, plain, or lists of such."""
    for item in items:
        kind = type(item)
        if kind is torch.Tensor or kind is nn.Parameter:
            tensors.append(item)
        elif kind is list or kind is tuple:
            if not _collect(item, tensors):
                return False
        elif kind not in PLAIN:
            return False
    return True


def _without_tensors(items: Any) -> Any:
    """Returns arguments with `TENSOR` in the place of tensors: a form holds none."""
    found = []
    for item in items:
        if isinstance(item, torch.Tensor):
            found.append(TENSOR)
        else:
            found.append(_without_tensors(item) if isinstance(item, (list, tuple)) else item)
    return type(items)(found)


def with_tensors(items: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Returns arguments with the next of the tensors in the place of each `TENSOR`."""
    found = []
    for item in items:
        if item is TENSOR:
            found.append(next(tensors))
        else:
            found.append(with_tensors(item, tensors) if isinstance(item, (list, tuple)) else item)
    return type(items)(found)


class Noted(Made):
    """An op that was recorded by its form."""

    def __init__(self, form: OpForm, values: tuple[Value, ...], order: int) -> None:
        self.form = form
        self.values = values
        self.order = order
