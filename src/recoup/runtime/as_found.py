"""A public function leaves the process as it found it when an exception ends it, wherever that came.

Context managers put back what they set. An exception (Ctrl-C) can come where none does: between `__enter__` and its
block, between the block and `__exit__`, in the first line of a `finally`. What would outlive the call is therefore
noted where it begins, and put back where it fails: a profiler that still runs makes the next measurement fail, hooks on
saved tensors and dispatch modes see every later step, warnings stay off.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn

from recoup import _interrupts, _torch, progress
from recoup.runtime import execution_context, scan_bytes
from recoup.runtime.apply import find_patches
from recoup.runtime.patch import PatchedForward, unpatch
from recoup.runtime.rebuild import lineage
from recoup.runtime.recompute import scope
from recoup.runtime.step_watch import StepWatch, find_watches

_P = ParamSpec("_P")
_R = TypeVar("_R")


def all_or_nothing(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Has a function of a model leave nothing behind if it fails, no plan in place either; Ctrl-C ends it.

    An exception may come between any two lines: also where a plan was applied and nobody has its handle yet, or where
    it is taken off.
    """

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        given = [m for m in (*args[:1], kwargs.get("model")) if isinstance(m, nn.Module)]
        before = _Process(given)
        try:
            with _interrupts.heard(), progress.showing_in_notebook():
                return function(*args, **kwargs)
        except BaseException:
            try:
                before.put_back()
            except BaseException:  # one more interrupt: it is done all the same
                before.put_back()
                raise
            raise

    return run


class _Process:
    """What a call could leave in the process, on this thread and on its models, as it is now."""

    def __init__(self, models: list[nn.Module]) -> None:
        self._models = models
        self._patches = {id(patched) for patched in self._find_patches()}
        self._watches = {id(watch) for watch in self._find_watches()}
        self._torch = _torch.thread_settings()
        self._locals = [(here, _noted(here)) for here in _thread_locals()]
        self._is_recomputing = execution_context.is_recomputing()
        self._settings = [(get(), change) for get, change in _SETTINGS]

    def put_back(self) -> None:
        """Has everything as it was."""
        _torch.restore_thread_settings(self._torch)
        for here, values in self._locals:
            here.clear()
            here.update(values)
        if execution_context.is_recomputing() and not self._is_recomputing:
            execution_context.stop_recomputing()
        for (value, change), (get, _) in zip(self._settings, _SETTINGS, strict=True):
            if get() != value:
                change(value)
        for patched in self._find_patches():
            if id(patched) not in self._patches:
                unpatch(patched)
        for watch in self._find_watches():
            if id(watch) not in self._watches:
                watch.remove()

    def _find_patches(self) -> list[PatchedForward]:
        return [patched for model in self._models for patched in find_patches(model)]

    def _find_watches(self) -> list[StepWatch]:
        return [watch for model in self._models for watch in find_watches(model)]


def _thread_locals() -> list[dict[str, Any]]:
    """Returns recoup's own variables of this thread."""
    return [vars(each) for each in (execution_context._activity, lineage._current, scope.scope, scan_bytes._scans)]


def _noted(variables: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in variables.items()}


def _set_log_level(level: str | None) -> None:
    if level is None:
        os.environ.pop("KINETO_LOG_LEVEL", None)
    else:
        os.environ["KINETO_LOG_LEVEL"] = level


def _set_warnings(filters: list[Any]) -> None:
    warnings.resetwarnings()
    warnings.filters[:] = filters  # type: ignore[index]


def _set_signal(handler: Any) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


# How each thing is read, how it is set.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (lambda: list(warnings.filters), _set_warnings),
    (lambda: sys.unraisablehook, functools.partial(setattr, sys, "unraisablehook")),
    (lambda: signal.getsignal(signal.SIGINT), _set_signal),
    (_interrupts.waiting.get, _interrupts.waiting.set),
    (gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable()),
    (gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds)),
    (lambda: os.environ.get("KINETO_LOG_LEVEL"), _set_log_level),  # of the profiler; no other variable is ever set
)
