"""Which op a mark of a plan by tensor means: calls in progress, and how their ops are numbered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from recoup.ir.decision import OpMark
from recoup.runtime.rebuild.realigned import also_begins, realigned
from recoup.thresholds import MOST_REMEMBERED_ANSWERS, MOST_TRIES

_CAST = "aten._to_copy.default"  # autocast makes one of a parameter, or has it from another call


@dataclasses.dataclass(frozen=True, slots=True)
class Numbered:
    """Marks of a call as they lie in one kind of step.

    Attributes:
        marks: by the number of their op. names: of all its ops that have numbers, None while they are unknown.
    """

    marks: dict[int, OpMark]
    names: list[str] | None

    def may_begin_with(self, names: list[str]) -> bool:
        """Whether nothing speaks against the step's first ops having these names."""
        if self.names is not None:
            return self.names[: len(names)] == names
        return all([mark.op == names[at] for at, mark in self.marks.items() if at < len(names)])


class CallMarks:
    """The marks of a call, as the plan has them and as they lie in steps that run other ops.

    Attributes:
        latest: those of the last step.
    """

    def __init__(self, planned: dict[int, OpMark]) -> None:
        self._planned = self.latest = Numbered(planned, None)
        self._others: list[Numbered] = []

    def beginning(self, names: list[str]) -> Numbered | None:
        """Returns those of a step other than the last, known or planned, that may begin with these ops, or None."""
        for other in (*self._others, self._planned):
            if other is not self.latest and other.may_begin_with(names):
                self.latest = other
                return other
        return None

    def learn(self, names: list[str], *, is_other: bool) -> None:
        """Takes note of the ops that a call has run; `is_other`: they were others than those of the marks in use."""
        if not is_other:
            if self.latest.names is None:
                self._planned = self.latest = Numbered(self._planned.marks, names)
        elif len(self._others) < MOST_TRIES and all([other.names != names for other in self._others]):
            marks, known = self._planned.marks, self._planned.names or ()
            differ = (i for i, (name, planned) in enumerate(zip(names, known, strict=False)) if name != planned)
            num_alike = next(differ, min(len(names), len(known)))
            self.latest = Numbered(realigned([marks[at] for at in sorted(marks)], names, num_alike), names)
            self._others.append(self.latest)


def marks_of(marks: Iterable[OpMark]) -> dict[tuple[str, int], CallMarks]:
    """Returns the marks of one entry by module path and call."""
    found: dict[tuple[str, int], dict[int, OpMark]] = {}
    for mark in marks:
        found.setdefault((mark.path, mark.call), {})[mark.ordinal] = mark
    return {call: CallMarks(planned) for call, planned in found.items()}


class Frame:
    """One call that runs now.

    Attributes:
        marks: by number of op, None where there are none.
        ordinal: the number of the next op, of those that marks count, as the marks in use have it.
        missed: the mark in whose place another op stood.
        late: marks of ops that ran before it was known where they stand, with their results.

    Args:
        lost: is told of marks that met no op of theirs, in words.
    """

    __slots__ = (
        "_all_marks",
        "_beside_known",
        "_beside_results",
        "_is_other",
        "_known",
        "_lost",
        "_names",
        "_passed",
        "late",
        "marks",
        "missed",
        "ordinal",
        "path",
    )

    def __init__(self, path: str, marks: CallMarks | None, lost: list[str]) -> None:
        self.path = path
        self._all_marks = marks
        self._lost = lost
        self._names: list[str] | None = None if marks is None else []  # None, too, once ops ran that nobody saw
        self._known = None if marks is None else marks.latest.names
        self.marks = None if marks is None else marks.latest.marks
        self.ordinal = 0
        self.missed: OpMark | None = None
        self._is_other = False
        self._beside_known: list[str] = []  # the last ops, while none has a number
        self._beside_results: list[Any] = []  # theirs, the last one None until it is there
        self._passed: set[str] = set()  # those before them
        self.late: list[tuple[OpMark, Any]] = []

    def meet(self, name: str) -> OpMark | None:
        """Counts an op; returns its mark.

        Where the ops of the planned step are known, and another stands there, the numbers are those of a known step
        that has this op here; else ops have no numbers until some in a row are as in the planned step. Where its ops
        are not known, numbers go on; if the marked op comes later, it is numbered as the plan has it.
        """
        marks, at = self.marks, self.ordinal
        if marks is None:
            return None
        if self._names is not None:
            self._names.append(name)
        if self._known is not None:
            if self._beside_known or self._known[at : at + 1] != [name]:
                return self._beside(name)
            self.ordinal = at + 1
            return marks.get(at)
        self.ordinal = at + 1
        mark, missed = marks.get(at), self.missed
        if mark is None or mark.op != name:
            if missed is None or missed.op != name:
                if mark is not None and missed is None:
                    self.missed, self._is_other = mark, True
                return None
            mark = missed
            self.ordinal = mark.ordinal + 1
        elif missed is not None:
            self._lose(missed)
        self.missed = None
        return mark

    def _beside(self, name: str, num_alike: int = 3) -> OpMark | None:
        """Returns the mark of an op that comes where another was, or after such a one.

        Args:
            num_alike: ops in a row that tell where in the planned step they are.
        """
        self._is_other = True
        if not self._beside_known and self._all_marks is not None and self._names is not None:
            other = self._all_marks.beginning(self._names)
            if other is not None:
                self.marks, self._known, self.ordinal = other.marks, other.names, len(self._names)
                self._is_other = False
                return other.marks.get(self.ordinal - 1)
        known, at, marks = self._known or [], self.ordinal, self.marks or {}
        if not self._beside_known:
            next_at = next((i for i in range(at, len(known)) if known[i] != _CAST), len(known))
            if known[next_at : next_at + 1] == [name]:
                self.ordinal = next_at + 1
                return marks.get(next_at)
            if name == _CAST:
                return None
        recent = self._beside_known = [*self._beside_known, name]
        if len(recent) > num_alike:
            self._passed.add(recent.pop(0))
            del self._beside_results[0]
        self._beside_results.append(None)
        end = next(
            (i + num_alike for i in range(at, at + MOST_REMEMBERED_ANSWERS) if known[i : i + num_alike] == recent), 0
        )
        if len(recent) < num_alike or not end:
            return None
        for i in range(at, end - num_alike):
            if i in marks and marks[i].holds and marks[i].op in self._passed:
                self._lose(marks[i])
        results = zip(range(end - num_alike, end - 1), self._beside_results, strict=False)
        self.late = [(marks[i], result) for i, result in results if i in marks and result is not None]
        self.ordinal, self._beside_known, self._beside_results, self._passed = end, [], [], set()
        mark = marks.get(end - 1)
        for i in reversed(range(at, end - 1)):  # what was to begin with an op before it begins with this one
            if i in marks and marks[i].begins:
                mark = also_begins(mark, marks[i], end - 1, name)
        return mark

    def ran(self, result: Any) -> list[tuple[OpMark, Any]]:
        """Takes note of an op's result; returns what is to be obeyed late."""
        if self._beside_known and self._beside_results[-1] is None:
            self._beside_results[-1] = result
        late, self.late = self.late, []
        return late

    def expects(self, names: list[str]) -> bool:
        """Whether nothing speaks against the next ops having these names."""
        at = self.ordinal
        return (
            self.missed is None
            and not self._beside_known
            and (self._known is None or self._known[at : at + len(names)] == names)
        )

    def pass_ops(self, names: Sequence[str] | None, num_ops: int = 0) -> OpMark | None:
        """Counts ops that are those of the marks in use, `num_ops` of them where their names are not known.

        Returns:
            The last of their marks that begins a segment.
        """
        at, self.ordinal = self.ordinal, self.ordinal + (num_ops if names is None else len(names))
        if names is None:
            names = self._known[at : self.ordinal] if self._known is not None else None if num_ops else ()
        if names is None:
            self._names = None
        elif self._names is not None:
            self._names += names
        marks = self.marks
        if not marks:
            return None
        return next((m for i in reversed(range(at, self.ordinal)) if (m := marks.get(i)) and m.begins_segment), None)

    def settle(self) -> None:
        """Called when the call has returned."""
        marks = self.marks or {}
        later = [at for at in marks if at >= self.ordinal]
        if self.missed is not None or (later and self._beside_known):
            self._lose(self.missed or marks[min(later)])
        if self._all_marks is not None and self._names:  # a dropout that is off runs nothing
            is_shorter = bool(later) or (self._known is not None and self.ordinal < len(self._known))
            self._all_marks.learn(self._names, is_other=self.missed is not None or self._is_other or is_shorter)

    def _lose(self, mark: OpMark) -> None:
        self._lost.append(f"`{self.path}` runs no {mark.op} as op {mark.ordinal}")


def reads_numbers(args: Sequence[Any]) -> bool:
    """Whether an op is handed a tensor of floating-point or complex numbers: others have no number in their call.

    Code that asks about integers or masks may do so in a step and not while it is captured. Views have none either:
    after a write through a view, autograd makes the views of fake tensors again, and those of real ones not.
    """
    for item in args:
        if isinstance(item, torch.Tensor):
            if item.dtype.is_floating_point or item.dtype.is_complex:
                return True
        elif isinstance(item, (list, tuple)) and reads_numbers(item):
            return True
    return False


def reads_masks(args: Sequence[Any]) -> bool:
    """Whether an op is handed a tensor of booleans, or of the bytes that once were their dtype."""
    for item in args:
        if isinstance(item, torch.Tensor):
            if item.dtype in (torch.bool, torch.uint8):
                return True
        elif isinstance(item, (list, tuple)) and reads_masks(item):
            return True
    return False
