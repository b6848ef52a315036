"""A call that runs past the recorder: what the plan says of its ops, and what autograd saves of its results."""

from __future__ import annotations

from typing import Any

import torch

from recoup.ir.decision import OpMark
from recoup.runtime.rebuild.call_forms import CallForm
from recoup.runtime.rebuild.held_recorder import HeldRecorder
from recoup.runtime.rebuild.lineage import Value

_Marked = tuple[OpMark, int, tuple[int, ...]]


def marked(marks: dict[int, OpMark], begin: int, form: CallForm) -> list[_Marked | None]:
    """Returns what the plan says of a call's ops: each mark with how many tensors are saved before the op, and what it
    makes. None in it: what is to be held is not seen from outside, or the op is another.
    """
    found: list[_Marked | None] = []
    for i, (label, num_saved, numbers) in enumerate(form.counted):
        if (mark := marks.get(begin + i)) is not None:
            is_plain = mark.op == label and (numbers is not None or not (mark.holds or mark.is_joint))
            found.append((mark, num_saved, numbers or ()) if is_plain else None)
    return found


class Running:
    """A call that runs now and whose form is known: tells what autograd saves of its own results.

    Attributes:
        marks: of its ops, as `marked` returned them.
    """

    __slots__ = ("_begun", "_form", "_next", "_values", "marks")

    def __init__(self, form: CallForm, values: list[Value], marks: list[_Marked]) -> None:
        self._form = form
        self._values = values
        self._next = self._begun = 0
        self.marks = marks

    def saves(self, recorder: HeldRecorder, tensor: torch.Tensor) -> None:
        """Called before a tensor is packed."""
        position = self._next
        self._next = position + 1
        marks = self.marks
        while self._begun < len(marks) and marks[self._begun][1] <= position:
            recorder.begin(marks[self._begun][0], self._values)
            self._begun += 1
        expected = self._form.saves[position] if position < len(self._form.saves) else None
        if expected is not None and expected[0] is not None:
            size, stride, _, dtype = expected[1]
            if tensor.dtype is dtype and tensor.size() == size and tensor.stride() == stride:
                recorder.note_value(tensor, self._values[expected[0]])
                for mark, _, numbers in marks:
                    if expected[0] in numbers:
                        recorder.obey(mark, tensor)

    def end(self, recorder: HeldRecorder, out: Any) -> None:
        """Called after the call: does what the plan says of its results."""
        for mark, _, _ in self.marks[self._begun :]:
            recorder.begin(mark, self._values)
        for mark, _, numbers in self.marks:
            for position, number, _ in self._form.results:
                if number in numbers:
                    recorder.obey(mark, out if position < 0 else out[position])
