"""Calls of torch functions under a plan: one that fits a known form is recorded as a whole, past the dispatch mode.

A dispatch mode costs 7 us an op before it has done anything, a torch-function mode 2 us a call of several. So the
recorder's dispatch mode stays on for whatever comes, and a torch-function mode in front of it recognises the calls
whose ops are known (`call_forms.py`): the dispatch mode is off while they run, and what it would have recorded is
noted. A call that no form fits is recorded op by op, and learned from. Which call comes next is guessed from the step
before; a guess that is wrong costs a search among the forms of the function.

Only functions of torch's own are taken, in which no code of the user runs, and only those that write to nothing.
"""

from __future__ import annotations

import operator
import types
from typing import Any

import torch
import torch.nn.functional as F

from recoup import _torch
from recoup.runtime import execution_context
from recoup.runtime.loss_in_place import LossInPlaceMode
from recoup.runtime.rebuild.call_code import OTHER
from recoup.runtime.rebuild.call_forms import CallForm, form_after, form_before
from recoup.runtime.rebuild.call_log import CallLog
from recoup.runtime.rebuild.cheap_ops import ALLOCATES
from recoup.runtime.rebuild.known_calls import Calls
from recoup.runtime.rebuild.learning import Learning
from recoup.runtime.rebuild.running_call import Running, marked, note_ops
from recoup.runtime.rebuild.saved_tensor import pack, unpack
from recoup.runtime.rebuild.step_program import ProgramCall, StepKey
from recoup.runtime.rebuild.step_run import StepRun
from recoup.runtime.rebuild.values import Value

# Their answers are scalars, which are looked at where something is handed them.
_ASKED = ("size", "dim", "numel", "stride", "storage_offset", "is_contiguous", "is_floating_point")
_ASKS = frozenset([id(getattr(torch.Tensor, name)) for name in _ASKED])
_ALLOCATE = frozenset(
    [id(getattr(at, name)) for at in (torch, torch.Tensor) for name in ALLOCATES if hasattr(at, name)]
)
_Attribute = types.MethodWrapperType
# Calls in all but their form: what they return is a tensor over the memory of the one that they are read of.
_VIEWS = {getattr(torch.Tensor, name): operator.attrgetter(name) for name in ("T", "mT", "H", "mH", "real", "imag")}


class CallWatch(_torch.function_mode_class()):  # type: ignore[misc]
    """The torch-function mode in front of a recorder.

    Args:
        loss: runs cross entropies, in the place of a mode of its own, which would be on for every call of the model;
            None: they run as they are.
    """

    def __init__(self, recorder: Any, calls: Calls, key: StepKey, loss: LossInPlaceMode | None = None) -> None:
        super().__init__()
        self._loss = loss
        self.recorder: Any = recorder
        self._calls = calls
        self._last: CallForm | None = None
        is_inside = execution_context.observer() is None and not _torch.saves_plainly()
        self._key = StepKey(*[(part, is_inside) for part in key])  # of others' hooks, where no stretch is idle
        followed = calls.begin(recorder, self._key)
        self._run = recorder.program = followed if isinstance(followed, StepRun) else None
        self._learning = recorder.learning = followed if isinstance(followed, Learning) else None
        self._followed = followed
        recorder.is_aside = self._run is not None
        self._is_other = False
        self.hooks = _torch.saved_tensors_hooks(pack if self._run is None else self._run.hook, unpack)
        if followed is not None:
            recorder.stop_program = self._stop
            recorder.on_write = self._writes
        if self._learning is not None and loss is not None:
            self._learning.watch(F.cross_entropy)
        if self._run is not None:
            recorder.watch = self
            recorder.untold = self._run.boundary.untold

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        recorder = self.recorder
        recorder.program = recorder.learning = recorder.stop_program = recorder.on_write = None  # no cycle stays
        recorder.watch = None
        if isinstance(self._followed, StepRun):
            self._followed.close()

    @property
    def is_busy(self) -> bool:
        """Whether there is a program to follow or to learn."""
        return self._followed is not None

    @property
    def is_done(self) -> bool:
        """Whether a program was followed to its end."""
        return isinstance(self._followed, StepRun) and self._followed.is_done

    def learn(self) -> None:
        """Called when the step's forward has returned."""
        self._calls.end(self._key, self._followed)

    def leave(self) -> None:
        """Called before compiled code runs, which must not meet this mode: it is off from then on."""
        self._calls.is_compiled = True
        self._stop()
        self.put_off()

    def _writes(self, tensors: list[torch.Tensor]) -> None:
        """Called before an op writes to tensors; in a program only calls without a form may write."""
        if self._learning is not None:
            self._learning.is_written(tensors)
        elif not self._is_other:
            self._stop()

    def _stop(self) -> None:
        """Stops following and learning a program: the step did something that no program can contain."""
        recorder = self.recorder
        if self._run is not None:
            with _torch.past_function_modes():  # what it asks tensors is no call of the step
                self._run.end_early(recorder)
            recorder.step_in()
            self.hooks.put_on()
        elif self._learning is not None:
            self._learning.failed = True
        self._run = self._learning = recorder.program = recorder.learning = None
        recorder.stop_program = recorder.on_write = recorder.watch = None
        if self._loss is not None:
            self.put_back()  # in an idle stretch it is off, and the loss is still to come

    def passes(self, path: str | None) -> bool:
        """Called where a patched module of which it is to be told is entered or left (None).

        Returns whether the program says the same; else it has ended.
        """
        run = self._run
        assert run is not None
        boundary = run.boundary
        if (
            boundary.path != path
            or boundary.call is not run.call
            or (boundary.is_watched is self.is_off and not self._switch(on=boundary.is_watched))
        ):
            self._stop()
            return False
        if boundary.leaves:
            for slot in boundary.leaves:
                run.slots[slot] = None
        run.boundary = then = boundary.then  # type: ignore[assignment]
        self.recorder.untold = then.untold  # type: ignore[union-attr]
        return True

    def _switch(self, *, on: bool) -> bool:
        """Puts this mode on, or it and the hooks off; returns whether that is done."""
        return self.put_on() if on else (not self.hooks.is_on or self.hooks.put_off()) and self.put_off()

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = self._run
        if run is None:
            return self._unfollowed(func, args, kwargs)
        call = run.call
        if call.func is func and call.follow is not None:
            out = call.follow(self, run, args, kwargs)
            if out is not OTHER:
                return out
            self._stop()
            return self._unfollowed(func, args, kwargs)
        if type(func) is _Attribute and _is_read(func):
            view = _VIEWS.get(func.__self__)
            return func(*args) if view is None else self.__torch_function__(view, types_, args)
        if id(func) in _ASKS:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._look_at(run, func, args, kwargs)

    def hook(self, run: StepRun, call: ProgramCall) -> bool:
        """Has the hooks see what is saved in a call if the program says so; whether it was followed so far."""
        hooks = self.hooks
        if run.num_saved != call.first_save if hooks.is_on else call.is_hooked and not hooks.put_on():
            return False
        if call.is_hooked:
            run.num_saved = call.first_save
        elif hooks.is_on:
            hooks.put_off()
        return True

    def _look_at(self, run: StepRun, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Runs a call that is not simply the program's next."""
        if type(func) is _Attribute:
            self._stop()
            return func(*args)
        recorder = self.recorder
        call = None
        if not recorder.paused and not _torch.num_dispatch_modes() and self.hook(run, run.call):
            call = run.next_call(func, args, kwargs)
        if call is None:
            self._stop()
            return self._unfollowed(func, args, kwargs)
        if call.form is None and not self._is_loss(func):
            out = self.sees(run, call, args, kwargs)
        else:  # what a loss in place writes to is its logits, which nothing in a program is rebuilt from
            out = self._ran(func, args, kwargs)
        if run.is_on:
            run.returned(call, out)  # may end the program, and then the hooks stay
            if run.is_on and self.hooks.is_on and not call.stays_hooked and run.num_saved == call.end_save:
                self.hooks.put_off()
        return out

    def sees(self, run: StepRun, call: ProgramCall, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Runs a call of the program with the recorder on."""
        recorder = self.recorder
        recorder.step_in()
        self._is_other = True
        if call.draws:
            run.begin_draws(call, args, kwargs)
        try:
            return self._ran(call.func, args, kwargs)
        finally:
            self._is_other = False
            if run.is_on:
                recorder.step_aside()
                if not run.has_drawn(call):
                    self._stop()

    def reads_leaf(self, value: Value, tensor: torch.Tensor) -> None:
        """Called where an op reads what none was seen to make, in a call that runs with the recorder on."""
        if self._run is not None:
            self._run.reads_leaf(value, tensor)

    def _unfollowed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Runs a call of a step that follows no program."""
        if id(func) in _ASKS:
            return func(*args, **kwargs) if kwargs else func(*args)
        if type(func) is _Attribute:
            if not _is_read(func):
                self._stop()
                return func(*args)
            view = _VIEWS.get(func.__self__)
            return func(*args) if view is None else self._unfollowed(view, args, None)
        if self.recorder.paused or _torch.num_dispatch_modes() != 1 or _torch.inside_transform():
            self._stop()
            return self._ran(func, args, kwargs)
        return self._record(func, args, kwargs)

    def _ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Returns what a call without a form returns."""
        if self._is_loss(func):
            assert self._loss is not None
            return self._loss.__torch_function__(func, (), args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _is_loss(self, func: Any) -> bool:
        return func is F.cross_entropy and self._loss is not None

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Runs a call that no program has: by its form, if it has one."""
        if id(func) in _ALLOCATE and _torch.inside_custom_function():
            return self._look_into(func, args, kwargs, learns=False)
        recorder = self.recorder
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
        values = note_ops(recorder, form, tensors) if form.ops else _NO_VALUES
        if values is None:
            self._stop()
            return func(*args, **kwargs) if kwargs else func(*args)
        labels = [label for label, _, _ in form.counted]
        if not frame.expects(labels):
            self._stop()
            return func(*args, **kwargs) if kwargs else func(*args)
        marks = _NO_MARKS if frame.marks is None else marked(frame.marks, ordinal, form)
        if marks is None:
            self._stop()
            return func(*args, **kwargs) if kwargs else func(*args)
        if marks or form.saves:
            recorder.call = Running(form, values, marks)
            recorder.call.begin(recorder)
        elif num_ops:
            recorder.pass_op()
        frame.pass_ops(labels)
        learning = self._learning
        if learning is not None:
            learning.begin(func, form, tensors).note_items(args, kwargs, tensors)
        if form.written:
            handed = [tensors[position] for position, _ in form.written]
            with _torch.past_dispatch_modes():  # the copy is no op of the step
                for tensor in handed:
                    recorder.rescue(tensor)
            if learning is not None:
                learning.writes(handed)
        try:
            with _torch.past_dispatch_modes():
                out = func(*args, **kwargs) if kwargs else func(*args)
        finally:
            running, recorder.call = recorder.call, None
        for position, number in form.written:
            recorder.note_written(tensors[position], None if number is None else values[number])
        if form.results:
            recorder.note_results(form, values, out)
        if marks:
            running.end(recorder, out)
        if learning is not None:
            learning.end(out, num_ops)
        return out

    def _look_into(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, *, learns: bool = True
    ) -> Any:
        """Runs a call that no form fits op by op, and learns from it."""
        self._last = None
        recorder = self.recorder
        learning = self._learning
        frame = recorder.frame
        before = frame.ordinal
        told = log = form = None
        if learns and not self._is_loss(func) and self._calls.may_learn(func, args):
            log = CallLog()
            told = form_before(func, args, kwargs, log.state)
        if learning is not None:
            learning.begin_unknown(func, args, kwargs)
        recorder.log = recorder.call = log
        try:
            out = self._ran(func, args, kwargs)
        finally:
            recorder.log = recorder.call = None
        if log is not None:
            form = form_after(told, out, log, recorder.existing) if recorder.frame is frame else None
            if not log.hidden:  # else each is looked into, to see what it draws
                self._calls.learn(func, args, form)
        if learning is not None:
            learning.settle(form, log)
            learning.end(out, frame.ordinal - before if form is None else form.num_ops)
        return out


def _is_read(attribute: Any) -> bool:
    """Whether an attribute of a tensor is read that gives nobody its memory."""
    return attribute.__name__ != "__set__" and attribute.__self__ is not _data


_data = torch.Tensor.data
_NO_VALUES: list[Value] = []
_NO_MARKS: dict[int, Any] = {}
