"""Calls of torch functions under a plan: one that is like an earlier one is recorded whole, past the dispatch mode.

A dispatch mode costs 7 us an op before it has done anything, a torch-function mode 2 us a call of several. So the
recorder's dispatch mode stays on for whatever comes, and a torch-function mode in front of it recognises the calls
whose ops are known (`call_forms.py`): the dispatch mode is off while they run, and what it would have recorded is
noted. A call that no form fits is recorded op by op, and learned from. Which call comes next is guessed from the step
before; a guess that is wrong costs a search among the forms of the function.

Only functions of torch's own are taken, in which no code of the user runs, and only those that write to nothing.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from recoup import _torch
from recoup.ir.decision import OpMark
from recoup.runtime import execution_context
from recoup.runtime.rebuild.call_forms import CallForm, CallLog, form_of_call, scalars_of
from recoup.runtime.rebuild.held_recorder import HeldRecorder
from recoup.runtime.rebuild.learning import Learning
from recoup.runtime.rebuild.lineage import Value
from recoup.runtime.rebuild.step_program import StepProgram
from recoup.runtime.rebuild.step_run import StepRun
from recoup.thresholds import MOST_REMEMBERED_ANSWERS, MOST_TRIES

_TORCHS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_MODULES = frozenset(["torch.nn.functional", "torch.functional", "torch._tensor"])


class Calls:
    """The forms of a plan's calls; all steps share them.

    Attributes:
        is_compiled: a part of the model is compiled. learns, follows: classes of what `begin` returns.
    """

    learns: type[Learning] = Learning
    follows: type[StepRun] = StepRun

    def __init__(self) -> None:
        self.is_compiled = False
        self._forms: dict[Any, list[CallForm]] = {}
        self._misses: dict[Any, int] = {}
        self._num_forms: dict[Any, int] = {}
        self._programs: dict[Any, StepProgram] = {}
        self._seen: dict[Any, int] = {}

    def begin(self, recorder: Any, key: Any) -> StepRun | Learning | None:
        """Returns what follows a step: the program of earlier ones like it, or who learns one; None at first.

        Args:
            key: equal for steps that may be alike.
        """
        if execution_context.observer() is not None:
            return None
        program = self._programs.get(key)
        slots = None if program is None else program.slots()
        if program is not None and slots is not None:
            return self.follows(program, slots, recorder)
        num = self._seen[key] = self._seen.get(key, 0) + 1
        return self.learns(recorder) if 1 < num <= MOST_TRIES and len(self._programs) < MOST_TRIES else None

    def end(self, key: Any, followed: StepRun | Learning | None) -> None:
        """Takes note of how it went."""
        if isinstance(followed, Learning):
            program = followed.program()
            if program is not None:
                self._programs[key] = program
        elif followed is not None and not followed.is_done:
            self._programs.pop(key, None)

    def known(self, func: Any, args: tuple[Any, ...]) -> list[CallForm]:
        """Returns the forms of a function's calls that may be like one with these arguments."""
        return self._forms.get((func, _kind(args)), _NONE)

    def may_learn(self, func: Any) -> bool:
        """Whether calls of a function can have forms, and it was not found that none ever fits."""
        # A loop in Python has a form for each step's slice of a tensor, so many for each of some tensors.
        if self._misses.get(func, 0) >= MOST_TRIES or self._num_forms.get(func, 0) >= MOST_REMEMBERED_ANSWERS**2:
            return False
        return isinstance(func, _TORCHS) or (
            isinstance(func, types.FunctionType) and func.__module__ in _MODULES and func is not torch.Tensor.backward
        )

    def learn(self, func: Any, args: tuple[Any, ...], form: CallForm | None) -> None:
        """Adds a form; None: a call had none."""
        if form is None:
            self._misses[func] = self._misses.get(func, 0) + 1
        else:
            self._misses[func] = 0
            self._num_forms[func] = self._num_forms.get(func, 0) + 1
            self._forms.setdefault((func, _kind(args)), []).append(form)


_NONE: list[CallForm] = []


def _kind(args: tuple[Any, ...]) -> Any:
    """Returns what tells most calls of a function apart: how the first tensor lies, and what is plain."""
    if not args or type(args[0]) is not torch.Tensor:
        return None
    return args[0].shape, args[0].storage_offset(), scalars_of(args[1:])


class CallWatch(_torch.function_mode_class()):  # type: ignore[misc]
    """The torch-function mode in front of a recorder."""

    def __init__(self, recorder: Any, calls: Calls, key: Any) -> None:
        super().__init__()
        self._recorder: Any = recorder
        self._calls = calls
        self._last: CallForm | None = None
        self._key = key
        followed = calls.begin(recorder, key)
        self._run = recorder.program = followed if isinstance(followed, StepRun) else None
        self._learning = recorder.learning = followed if isinstance(followed, Learning) else None
        self._followed = followed
        recorder.followed = self._run is not None
        self._is_other = False
        if followed is not None:
            recorder.stop_program = self._stop
            recorder.on_write = self._writes

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        recorder = self._recorder
        recorder.program = recorder.learning = recorder.stop_program = recorder.on_write = None  # no cycle stays

    @property
    def is_busy(self) -> bool:
        """Whether there is a program to follow or to learn."""
        return self._followed is not None

    def learn(self) -> None:
        """Called when the step's forward has returned."""
        self._calls.end(self._key, self._followed)

    def leave(self) -> None:
        """Called before compiled code runs, which must not meet this mode: it is off from then on."""
        self._calls.is_compiled = True
        self._stop()
        super().leave()

    def _writes(self, tensors: list[torch.Tensor]) -> None:
        """Called before an op writes to tensors: a program has that only inside of its calls without form."""
        if self._learning is not None:
            self._learning.writes(tensors)
        elif not self._is_other:
            self._stop()

    def _stop(self) -> None:
        """Ends what follows the step: something is done that no program has."""
        recorder = self._recorder
        if self._run is not None:
            self._run.end(recorder)
        elif self._learning is not None:
            self._learning.failed = True
        self._run = self._learning = recorder.program = recorder.learning = None
        recorder.stop_program = recorder.on_write = None

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if type(func) is types.MethodWrapperType:  # an attribute
            if func.__name__ == "__set__":
                self._stop()
            return func(*args)
        recorder = self._recorder
        if recorder.paused or _torch.num_dispatch_modes() != 1:
            self._stop()
            return func(*args, **kwargs) if kwargs else func(*args)
        run = self._run
        if run is not None:
            call = run.next_call(func, args, kwargs)
            if call is not None:
                if call.form is None:
                    self._is_other = True
                    try:
                        out = func(*args, **kwargs) if kwargs else func(*args)
                    finally:
                        self._is_other = False
                else:
                    recorder.frame.ordinal += call.num_ops
                    with _torch.past_dispatch_modes():
                        out = func(*args, **kwargs) if kwargs else func(*args)
                if self._run is not None:
                    run.returned(call, out)
                return out
            self._stop()
        return self._record(func, args, kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Runs a call that no program has: by its form, if it has one."""
        recorder = self._recorder
        last = self._last
        guess = None if last is None else last.then
        tensors = None
        if guess is not None and guess[0] is func:
            form = guess[1]
            tensors = form.tensors(args, kwargs)
        if tensors is None:
            for form in self._calls.known(func, args):
                tensors = form.tensors(args, kwargs)
                if tensors is not None:
                    break
            else:
                return self._look_into(func, args, kwargs)
            if last is not None:
                last.then = func, form
        self._last = form
        frame = recorder.frame
        ordinal, num_ops = frame.ordinal, form.num_ops
        values = recorder.note_ops(form, tensors) if form.ops else _NO_VALUES
        if values is None:
            self._stop()
            return func(*args, **kwargs) if kwargs else func(*args)
        if frame.missed is not None:
            self._stop()
            return func(*args, **kwargs) if kwargs else func(*args)
        if frame.marks is not None and (marks := _marked(frame.marks, ordinal, form)):
            plain = [mark for mark in marks if mark is not None]
            if len(plain) < len(marks):
                self._stop()
                return func(*args, **kwargs) if kwargs else func(*args)
            recorder.call = Running(form, values, plain)
        elif form.saves:
            recorder.call = Running(form, values, [])
        frame.ordinal = ordinal + num_ops
        learning = self._learning
        if learning is not None:
            learning.begin(func, form, tensors)
        try:
            with _torch.past_dispatch_modes():
                out = func(*args, **kwargs) if kwargs else func(*args)
        finally:
            running, recorder.call = recorder.call, None
        if form.results:
            recorder.note_results(form, values, out)
        if running is not None and running.marks:
            running.end(recorder, out)
        if learning is not None:
            learning.end(out, num_ops)
        return out

    def _look_into(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Runs a call that no form fits op by op, and learns from it."""
        self._last = None
        recorder = self._recorder
        learning = self._learning
        if learning is not None:
            learning.begin_other(func, args, kwargs)
        if not self._calls.may_learn(func):
            out = func(*args, **kwargs) if kwargs else func(*args)
            if learning is not None:
                learning.end(out, 0)
            return out
        log = CallLog()
        frame = recorder.frame
        recorder.log = recorder.call = log
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        finally:
            recorder.log = recorder.call = None
        form = form_of_call(func, args, kwargs, out, log, recorder.existing) if recorder.frame is frame else None
        self._calls.learn(func, args, form)
        if learning is not None:
            learning.end(out, 0)
            if form is not None:
                learning.leave_other()
        return out


_NO_VALUES: list[Value] = []
_Marked = tuple[OpMark, int, tuple[int, ...]]


def _marked(marks: dict[int, OpMark], begin: int, form: CallForm) -> list[_Marked | None]:
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
        marks: of its ops, as `_marked` returned them.
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
            recorder.begin(marks[self._begun][0])
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
            recorder.begin(mark)
        for mark, _, numbers in self.marks:
            for position, number, _ in self._form.results:
                if number in numbers:
                    recorder.obey(mark, out if position < 0 else out[position])
