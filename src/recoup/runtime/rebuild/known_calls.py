"""The forms of a plan's calls, and the programs of its steps: what all steps share."""

from __future__ import annotations

import operator
import types
from typing import Any

import torch

from recoup.runtime import execution_context
from recoup.runtime.rebuild.call_forms import CallForm, scalars_of
from recoup.runtime.rebuild.dynamic_program import with_varied_sizes
from recoup.runtime.rebuild.learning import Learning
from recoup.runtime.rebuild.step_program import StepProgram
from recoup.runtime.rebuild.step_run import StepRun
from recoup.thresholds import MOST_REMEMBERED_ANSWERS, MOST_TRIES

_TORCHS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    operator.attrgetter,  # of a tensor: `CallWatch` calls it for `x.T`
)
_MODULES = frozenset(["torch.nn.functional", "torch.functional", "torch._tensor"])


class Calls:
    """The forms of a plan's calls; all steps share them.

    Attributes:
        is_compiled: a part of the model is compiled. learns, follows: classes of what `begin` returns.
        varies: whether steps of other sizes may follow a program, see [Note: dynamic shapes].
    """

    learns: type[Learning] = Learning
    follows: type[StepRun] = StepRun
    varies = True

    def __init__(self) -> None:
        self.is_compiled = False
        self._forms: dict[Any, list[CallForm]] = {}
        self._misses: dict[Any, int] = {}
        self._num_forms: dict[Any, int] = {}
        self._programs: dict[Any, StepProgram] = {}
        self._varied: dict[Any, StepProgram] = {}  # of steps whose sizes vary, by kind
        self._latest: dict[Any, StepProgram] = {}  # learned, by kind
        self._left: set[Any] = set()  # kinds of steps the last of which left its program
        self._num_tries: dict[Any, int] = {}  # to learn a program

    def begin(self, recorder: Any, key: Any, kind: Any) -> StepRun | Learning | None:
        """Returns what follows a step: the program of earlier ones like it, or who learns one; None after some tries.

        Args:
            key: equal for steps that may be alike. kind: but for their sizes.
        """
        is_observed = execution_context.observer() is not None
        learns_again = kind in self._left and self._num_tries.get(kind, 0) < MOST_TRIES
        for program in () if is_observed else (self._programs.get(key), self._varied.get(kind)):
            if program is not None and not (program.is_varied and learns_again):
                slots = program.slots()
                if slots is not None:
                    return self.follows(program, slots, recorder)
        num_tries = max(self._num_tries.get(key, 0), self._num_tries.get(kind, 0))
        if is_observed or num_tries >= MOST_TRIES or len(self._programs) >= MOST_TRIES:
            return None
        counted = kind if learns_again else key
        self._num_tries[counted] = self._num_tries.get(counted, 0) + 1
        return self.learns(recorder)

    def end(self, key: Any, kind: Any, followed: StepRun | Learning | None) -> None:
        """Takes note of how it went."""
        if isinstance(followed, Learning):
            self._left.discard(kind)
            program = followed.program()
            if program is not None:
                self._programs[key] = program
                self._vary(key, kind, program)
        elif followed is not None and not followed.is_done and self._programs.pop(key, None) is None:
            self._left.add(kind)

    def _vary(self, key: Any, kind: Any, program: StepProgram) -> None:
        """Has steps of other sizes follow a new program, if an earlier one did the same with other sizes."""
        before = self._varied.get(kind) or self._latest.get(kind)
        self._latest[kind] = program
        if self.varies and before is not None and with_varied_sizes(before, program):
            self._varied[kind] = program
            del self._programs[key]

    def known(self, func: Any, args: tuple[Any, ...]) -> list[CallForm]:
        """Returns the forms of a function's calls that may be like one with these arguments."""
        return self._forms.get((func, _kind(args)), _NONE)

    def may_learn(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether calls of a function can have forms, and it was not found that none ever fits."""
        # A loop in Python has a form for each step's slice of a tensor, so many for each of some tensors.
        # Some kinds of its calls may have forms where others have none: a slice and a choice by mask.
        if self._misses.get(func, 0) >= MOST_REMEMBERED_ANSWERS:
            return False
        if self._misses.get((func, _kind(args)), 0) >= MOST_TRIES:
            return False
        if self._num_forms.get(func, 0) >= MOST_REMEMBERED_ANSWERS**2:
            return False
        return isinstance(func, _TORCHS) or (
            isinstance(func, types.FunctionType) and func.__module__ in _MODULES and func is not torch.Tensor.backward
        )

    def learn(self, func: Any, args: tuple[Any, ...], form: CallForm | None) -> None:
        """Adds a form; None: a call had none."""
        if form is None:
            for each in (func, (func, _kind(args))):
                self._misses[each] = self._misses.get(each, 0) + 1
        else:
            self._misses[func] = 0
            self._num_forms[func] = self._num_forms.get(func, 0) + 1
            self._forms.setdefault((func, _kind(args)), []).append(form)


_NONE: list[CallForm] = []


def _kind(args: tuple[Any, ...]) -> Any:
    """Returns a key of a call among those of its function: size and stride of the first tensor, and the scalars."""
    if not args or type(args[0]) is not torch.Tensor:
        return None
    return args[0].shape, args[0].storage_offset(), scalars_of(args[1:])
