"""A call that runs past the recorder: what the plan says of its ops, and what autograd saves of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recoup import _torch
from recoup.ir.decision import OpMark
from recoup.runtime.rebuild.call_forms import CallForm
from recoup.runtime.rebuild.held_recorder import HeldRecorder
from recoup.runtime.rebuild.op_forms import Noted
from recoup.runtime.rebuild.values import Value

_Marked = tuple[OpMark, tuple[int, ...]]


def marked(marks: dict[int, OpMark], begin: int, form: CallForm) -> dict[int, _Marked] | None:
    """Returns what the plan says of a call's ops, by place: each mark with the numbers of what the op makes.

    None: what is to be held is not seen from outside, or an op is another than the plan's.
    """
    found: dict[int, _Marked] = {}
    for i, (label, _, numbers) in enumerate(form.counted):
        if (mark := marks.get(begin + i)) is not None:
            if mark.op != label or (numbers is None and (mark.holds or mark.stays or mark.is_joint)):
                return None
            found[i] = mark, numbers or ()
    return found


def note_ops(recorder: HeldRecorder, form: CallForm, tensors: Sequence[torch.Tensor]) -> list[Value] | None:
    """Notes the ops of a call that is about to run past this recorder; returns what they read and make.

    None if the call is not as its form has it: what its tensors lie over is read otherwise.
    """
    values = []
    for tensor, dtype in zip(tensors, form.dtypes, strict=True):
        value = recorder.value_of(tensor)
        if value.made is None and value.constant is None:
            with _torch.past_dispatch_modes():
                recorder.read_leaf(value, tensor)
        if value.base is not None and value.base[3] is not dtype:
            return None
        values.append(value)
    for one, other in form.aliases:
        if values[one] is not values[other]:
            return None
    for position, _ in form.written:
        if sum([value is values[position] for value in values]) > 1:
            return None
    for base in form.draws:
        mask = Value()
        mask.random_mask = base[3] is not torch.bool
        mask.base = base
        values.append(mask)
    for base in form.left:
        value = Value()
        value.base = base
        values.append(value)
    for op, picks in form.ops:
        recorder.num_made += 1
        made = Noted(op, tuple([values[i] for i in picks]), recorder.num_made)
        for position, base in op.bases:
            value = Value()
            value.made = made
            value.base = base
            if position:
                value.output = position
            values.append(value)
    return values


class Running:
    """A call that runs now and whose form is known: tells what autograd saves of its own results.

    Args:
        values: of the form, by number. marks: of its ops, by place.
    """

    __slots__ = ("_form", "_marks", "_num_ops", "_num_saved", "_values")

    def __init__(self, form: CallForm, values: list[Value], marks: dict[int, _Marked]) -> None:
        self._form = form
        self._values = values
        self._marks = marks
        self._num_ops = self._num_saved = 0

    def begin(self, recorder: HeldRecorder) -> None:
        """Called before the call, and when a tensor was packed: begins the ops that come before the next one is."""
        counted = self._form.counted
        while self._num_ops < len(counted) and counted[self._num_ops][1] <= self._num_saved:
            marked = self._marks.get(self._num_ops)
            if marked is not None:
                recorder.begin(marked[0], self._values)
            recorder.pass_op()
            self._num_ops += 1

    def saves(self, recorder: HeldRecorder, tensor: torch.Tensor) -> None:
        """Called before a tensor is packed."""
        position = self._num_saved
        self._num_saved = position + 1
        if position >= len(self._form.saves):
            return
        number, (size, stride, _, dtype) = self._form.saves[position]
        shown = self._form.shows.get(position)
        if tensor.dtype is not dtype or tensor.size() != size or tensor.stride() != stride:
            return
        if number is not None:
            if position in self._form.casts and not recorder.is_new(tensor):
                self._forget_casts()
                recorder.read_leaf(self._values[number], tensor)
                if recorder.learning is not None:
                    recorder.learning.failed = True
            value = self._values[number]
            if self._form.written:
                recorder.note_written(tensor, value)
            else:
                recorder.note_value(tensor, value, is_over=bool(self._form.passing))
            value.is_passing = number in self._form.passing
            for mark, numbers in self._marks.values():
                if number in numbers:
                    recorder.obey(mark, tensor)
        if shown is not None:
            self._shows(recorder, shown, tensor)
        if position in self._form.casts and recorder.learning is not None:
            recorder.learning.casts()

    def _forget_casts(self) -> None:
        """Called when autocast has a parameter's cast from before the step: the parameter may have changed since."""
        for value in self._values:
            made = value.made
            if type(made) is Noted and made.form.is_cast and any(read.constant is not None for read in made.values):
                value.made = None

    def _shows(self, recorder: HeldRecorder, number: int, tensor: torch.Tensor) -> None:
        """Called when autograd saves what tells a random mask that the call drew."""
        value = self._values[number]
        kept = recorder.show_mask(value, tensor)
        if recorder.learning is not None:
            recorder.learning.shows(value)
        for mark, numbers in self._marks.values():
            if number in numbers:
                recorder.obey_for(mark, value, kept)

    def end(self, recorder: HeldRecorder, out: Any) -> None:
        """Called after the call: does what the plan says of its results."""
        for mark, numbers in self._marks.values():
            for position, number, _ in self._form.results:
                if number in numbers:
                    recorder.obey(mark, out if position < 0 else out[position])
