"""A public function that ends in an exception leaves the process as it found it, wherever the exception came.

Context managers restore what they set. But an exception (Ctrl-C) can come where no context manager acts: between
`__enter__` and its block, between the block and `__exit__`, in the first line of a `finally`. State that would outlive
the call is therefore noted at its start and restored if it fails: a profiler that still runs would make the next
measurement fail, saved-tensor hooks and dispatch modes would see every later step, warnings would stay off.
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
from recoup.runtime.apply import find_all_patches
from recoup.runtime.patch import Patched, unpatch
from recoup.runtime.rebuild import lineage
from recoup.runtime.recompute import scope
from recoup.runtime.step_watch import StepWatch, find_watches

_P = ParamSpec("_P")
_R = TypeVar("_R")


def all_or_nothing(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function of a model: if it raises, process and model are restored, and no plan is left in place.

    An exception may come between any two lines: also after a plan was applied and before anybody has its handle, or
    while it is removed.
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
            except BaseException:  # a second interrupt: restore again
                before.put_back()
                raise
            raise

    return run


class _Process:
    """A snapshot of the state of process, thread and models that a call could leave changed."""

    def __init__(self, models: list[nn.Module]) -> None:
        self._models = models
        self._patches = {id(patched) for patched in self._find_patches()}
        self._watches = {id(watch) for watch in self._find_watches()}
        self._torch = _torch.thread_settings()
        self._locals = [(here, _noted(here)) for here in _thread_locals()]
        self._is_recomputing = execution_context.is_recomputing()
        self._settings = [(get(), change) for get, change in _SETTINGS]

    def put_back(self) -> None:
        """Restores the snapshot."""
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

    def _find_patches(self) -> list[Patched]:
        return [patched for model in self._models for patched in find_all_patches(model)]

    def _find_watches(self) -> list[StepWatch]:
        return [watch for model in self._models for watch in find_watches(model)]


def _thread_locals() -> list[dict[str, Any]]:
    """Returns the namespaces of recoup's thread-local objects on this thread."""
    return [vars(each) for each in (execution_context._activity, lineage.current, scope.scope, scan_bytes._scans)]


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


# (getter, setter) of each setting.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (lambda: list(warnings.filters), _set_warnings),
    (lambda: sys.unraisablehook, functools.partial(setattr, sys, "unraisablehook")),
    (lambda: signal.getsignal(signal.SIGINT), _set_signal),
    (_interrupts.waiting.get, _interrupts.waiting.set),
    (gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable()),
    (gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds)),
    (lambda: os.environ.get("KINETO_LOG_LEVEL"), _set_log_level),  # of the profiler; no other variable is ever set
)
