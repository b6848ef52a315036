"""What one call of a torch function does, noted while its ops are recorded one by one: a form is made from it."""

from __future__ import annotations

from typing import Any

import torch

from recoup import _torch
from recoup.runtime.rebuild.batch_norm import Applied
from recoup.runtime.rebuild.cheap_ops import OpFacts, op_facts
from recoup.runtime.rebuild.op_forms import Noted, OpForm, form_of, form_of_rewriting
from recoup.runtime.rebuild.rewriting import Rewriting
from recoup.runtime.rebuild.shortcuts import shown_mask
from recoup.runtime.rebuild.values import Geometry, Made, Value, geometry_of


class CallLog:
    """Ops and saved tensors of one call, collected while it is recorded op by op.

    Attributes:
        ops: form, values read and values made of each recorded op; None once there was one that has no form.
        counted: label of each counted op, how many tensors autograd had saved before it, and the values made.
        saved: value (None: unknown) and geometry of each tensor that autograd saved.
        drawn: random masks that a kernel returned, and other random numbers. left: statistics left for its backward.
        leaves: what ops read and none was seen to make. hidden: random masks that nothing that is saved tells, by their
            place among the leaves that are the call's own; filled with its form.
        writes: of each write to a storage: its address, the values before and after it.
        state: what else decides about its ops, before it runs: the call may turn gradients on or off.
    """

    __slots__ = ("counted", "drawn", "hidden", "leaves", "left", "made", "ops", "saved", "state", "writes")

    def __init__(self) -> None:
        self.state = _torch.call_state()
        self.drawn: list[Value] = []
        self.leaves: list[Value] = []
        self.hidden: dict[int, Value] = {}
        self.left: list[Value] = []
        self.writes: list[tuple[int, Value | None, Value]] = []
        self.ops: list[tuple[OpForm, tuple[Value, ...], list[Value]]] | None = []
        self.counted: list[tuple[str, int, list[Value]]] = []
        self.made: list[Value] = []  # by the op that runs now, if it is counted
        self.saved: list[tuple[Value | None, Geometry]] = []

    def count(self, label: str) -> None:
        """Notes an op that is about to run and has a number."""
        self.made = []
        self.counted.append((label, len(self.saved), self.made))

    def saves(self, recorder: Any, tensor: torch.Tensor) -> None:
        """Called before a tensor is packed."""
        if tensor.layout is not torch.strided:
            self.ops = None
            return
        value, geometry = recorder.existing(tensor), geometry_of(tensor)
        self.saved.append((value, geometry))
        if recorder.learning is not None and value is not None:
            mask = shown_mask(value, geometry) or value
            if mask.random_mask or (is_mask(mask) and any(mask is drawn for drawn in self.drawn)):
                recorder.learning.shows(mask)

    def begin(self, recorder: Any) -> None:
        """Called when it was packed: ops are seen themselves."""

    def note_ops(self) -> None:
        """Has what the ops made be noted as made by their forms, as it is where the call is known beforehand."""
        for form, read, values in self.ops or ():
            made = next((value.made for value in values if value.made is not None), None)
            if made is not None:
                noted = Noted(form, read, made.order)
                for value in values:
                    value.made = noted

    def values_before(self, handed: list[torch.Tensor], known: list[Value | None], recorder: Any) -> list[Value | None]:
        """Returns what was in the storages of what the call was handed; `known`: as far as it was known before it."""
        first = {address: old for address, old, _ in reversed(self.writes)}
        return [
            value or first.get(tensor.untyped_storage()._cdata) or recorder.existing(tensor)
            for tensor, value in zip(handed, known, strict=True)
        ]

    def add_other(self) -> None:
        """Notes an op that has no form."""
        self.ops = None

    def add_op(self, form: OpForm | None, made: Made | None, values: list[Value]) -> None:
        """Notes a recorded op and what it made; without a form there is none of the call."""
        if self.ops is None:
            return
        if form is None or made is None:
            self.ops = None
        else:
            self.ops.append((form, made.values, values))
            self.made.extend(values)
            self.made = []

    def add_applied(self, applied: Applied) -> None:
        """Notes a BatchNorm in training."""
        self.left += applied.statistics
        *before, (form, made, value) = applied.ops
        for first_form, first, result in before:
            if self.ops is not None and first_form is not None:
                self.ops.append((first_form, first.values, [result]))
            else:
                self.ops = None
        self.add_op(form, made, [value])

    def add_write(
        self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: torch.Tensor, old: Value, new: Any
    ) -> None:
        """Notes that an op wrote to a tensor.

        Args:
            old, new: values of its storage before and after, None for a parameter's.
        """
        if new is None:
            self.ops = None
            return
        self.writes.append((tensor.untyped_storage()._cdata, old, new))
        if new.made is not None:
            function = new.made.function  # that of new tensors
            if type(function) is Rewriting:
                form = form_of_rewriting(facts, args, kwargs, tensor, new)
            else:
                form = form_of(op_facts(function), args, kwargs, tensor, [(0, tensor)])
            self.add_op(form, new.made, [new])
        elif facts.draws and new.base is not None:
            if not new.random_mask:
                self.drawn.append(new)
        elif not (new.random_mask or facts.is_batch_norm):
            self.ops = None


def is_mask(drawn: Value) -> bool:
    """Whether these random numbers are zeros and ones."""
    return drawn.random_mask or (drawn.base is not None and drawn.base[3] is torch.bool)
