"""What an op was when it ran: enough to note that it runs once more on tensors that lie as they did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.runtime.rebuild.cheap_ops import OpFacts
from recoup.runtime.rebuild.lineage import PLAIN, Geometry, Made, Value, geometry_of


class OpForm:
    """One op of a call, with its scalars.

    Attributes:
        overload: what ran. call: runs it. rest: its arguments, None in the place of tensors where those do not come
            first, without them where they do. positions: of the tensors, None if they come first. kwargs: its own.
        geometries: of the tensors it read. bases: geometries of the results that are recorded, by position.
        is_single: it returns one tensor.
        gives_again: says whether results lie as they did, when it runs again; found on the first time.
    """

    __slots__ = ("bases", "call", "geometries", "gives_again", "is_cast", "is_single", "kwargs", "overload", "positions", "rest")

    def __init__(
        self,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        recorded: list[tuple[int, torch.Tensor]],
        positions: list[int],
    ) -> None:
        self.overload = facts.overload
        self.call = _torch.op_call(facts.overload)
        num = len(positions)
        self.positions: tuple[int, ...] | None = None
        self.rest: Any = args[num:]
        if positions != list(range(num)):
            self.positions = tuple(positions)
            self.rest = [None if i in positions else item for i, item in enumerate(args)]
        self.kwargs = kwargs
        self.geometries = tuple([geometry_of(args[i]) for i in positions])
        self.bases = tuple([(position, geometry_of(t)) for position, t in recorded])
        self.is_cast = facts.label == "aten._to_copy.default"
        self.is_single = type(out) is torch.Tensor
        self.gives_again: Callable[..., bool] | None = None

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """Runs the op again on tensors that lie as the first time."""
        if self.positions is None:
            args = (*tensors, *self.rest)
        else:
            args = self.rest.copy()
            for position, tensor in zip(self.positions, tensors, strict=True):
                args[position] = tensor
        return self.call(*args, **self.kwargs) if self.kwargs else self.call(*args)

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


def form_of(
    facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, recorded: list[tuple[int, torch.Tensor]]
) -> OpForm | None:
    """Returns the form of an op that was recorded; None if its arguments are of kinds that take a closer look.

    Args:
        recorded: results whose making was recorded, with their positions.
    """
    schema = facts.overload._schema.arguments
    positions = []
    for i, item in enumerate(args):
        if type(item) is torch.Tensor or type(item) is nn.Parameter:
            positions.append(i)
        elif type(item) in (list, tuple):
            if "Tensor" in str(schema[i].type) or any(type(x) not in PLAIN for x in item):
                return None
        elif type(item) not in PLAIN:
            return None
    outs = out if type(out) is tuple else (out,)
    if not are_plain(kwargs) or not recorded or any(type(t) is not torch.Tensor for t in outs):
        return None
    return OpForm(facts, args, kwargs, out, recorded, positions)


class Noted(Made):
    """An op that was recorded by its form."""

    def __init__(self, form: OpForm, values: tuple[Value, ...], order: int) -> None:
        self.form = form
        self.values = values
        self.order = order


def are_plain(kwargs: Mapping[str, Any]) -> bool:
    """Whether there is no tensor among keyword arguments."""
    return all([type(item) in PLAIN for item in kwargs.values()]) if kwargs else True
