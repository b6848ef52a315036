"""The forms of a plan's calls, and the programs of its steps: what all steps share."""

from __future__ import annotations

import operator
import types
from typing import Any

import torch

from recoup.runtime import execution_context
from recoup.runtime.rebuild.call_forms import CallForm, scalars_of
from recoup.runtime.rebuild.dynamic_program import Comparison
from recoup.runtime.rebuild.learning import Learning
from recoup.runtime.rebuild.step_program import StepKey, StepProgram
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
        compares: class of what has steps of other sizes follow a program, see [Note: dynamic shapes].
    """

    learns: type[Learning] = Learning
    follows: type[StepRun] = StepRun
    compares: type[Comparison] = Comparison

    def __init__(self) -> None:
        self.is_compiled = False
        self._forms: dict[Any, list[CallForm]] = {}
        self._misses: dict[Any, int] = {}
        self._num_forms: dict[Any, int] = {}
        self._programs: dict[Any, StepProgram] = {}
        self._varied: dict[Any, StepProgram] = {}  # of steps whose sizes vary, by kind
        self._latest: dict[Any, StepProgram] = {}  # learned, by kind
        self._learned: dict[Any, set[Any]] = {}  # which steps of a kind had a program
        self._left: set[Any] = set()  # kinds of steps the last of which left its program
        self._num_tries: dict[Any, int] = {}  # to learn a program

    def begin(self, recorder: Any, key: StepKey) -> StepRun | Learning | None:
        """Returns what follows a step: the program of one like it, or who learns one; None after some tries."""
        if execution_context.observer() is not None:
            return None
        alike, kind = key
        learns_again = kind in self._left and self._num_tries.get(kind, 0) < MOST_TRIES
        for program in (self._programs.get(alike), None if learns_again else self._varied.get(kind)):
            slots = None if program is None else program.slots()
            if program is not None and slots is not None:
                return self.follows(program, slots, recorder)
        counted = kind if learns_again else alike
        num_tries = self._num_tries.get(counted, 0)
        if num_tries >= MOST_TRIES or len(self._programs) >= MOST_TRIES:
            return None
        self._num_tries[counted] = num_tries + 1
        learning = self.learns(recorder)
        learning.keeps_lists = num_tries > 1 or any(other != alike for other in self._learned.get(kind, ()))
        return learning

    def end(self, key: StepKey, followed: StepRun | Learning | None) -> None:
        """Takes note of how it went."""
        alike, kind = key
        if isinstance(followed, Learning):
            self._left.discard(kind)
            program = followed.program()
            if program is not None and not self._is_varied(program, alike, kind):
                self._programs[alike] = program
        elif followed is not None and not followed.is_done and self._programs.pop(alike, None) is None:
            self._left.add(kind)

    def _is_varied(self, program: StepProgram, alike: Any, kind: Any) -> bool:
        """Has steps of other sizes follow a new program, if an earlier one did the same with other sizes."""
        before = self._varied.get(kind) or self._latest.get(kind)
        self._learned.setdefault(kind, set()).add(alike)
        is_varied = before is not None and self.compares(before, program).unites()
        self._latest[kind] = program  # not one that is half changed: Ctrl-C may come before
        if is_varied:
            self._varied[kind] = program
        return is_varied

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
