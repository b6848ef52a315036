"""Ambient state of a forward that may differ at its replay: context variables, modes, flags, global hooks.

`sdpa_kernel`, a `TorchFunctionMode`, `torch.device` as a context, `parametrize.cached()`, a `contextvars.ContextVar`:
each may be on around the forward only, or around backward only. The replay runs under the state of its region's
forward, plus torch's own counting modes that are on at the replay (`FlopCounterMode`); afterwards all is restored.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from recoup import _torch
from recoup.runtime.recompute.module_state import AttributeState


class Ambient:
    """Snapshot of the ambient state when a region was entered."""

    __slots__ = ("_context", "_flags", "_hooks", "_mode_state", "_modes", "_parametrized")

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._modes = _torch.user_modes()
        modes = [*self._modes[0], *self._modes[1]]
        self._mode_state = AttributeState((), modes) if modes else None
        self._flags = _torch.backend_flags()
        self._hooks = _torch.global_forward_hooks()
        self._parametrized = _torch.parametrization_cache()

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the forward in a copy of the noted context variables; what it sets there is discarded."""
        return self._context.copy().run(forward, *args, **kwargs)

    def _observers(self) -> tuple[Any, ...]:
        """Returns torch's own modes that are on now and were not then: they count the ops of backward and replays."""
        now = _torch.user_modes()[1]
        return tuple(
            m
            for m in now
            if type(m).__module__.startswith("torch.utils.") and not any(m is known for known in self._modes[1])
        )

    def is_here(self) -> bool:
        """Whether the current state equals the snapshot, so that nothing has to be restored."""
        if self._mode_state is not None or any(_torch.user_modes()) or self._flags != _torch.backend_flags():
            return False
        if self._hooks != _torch.global_forward_hooks():
            return False
        return not self._parametrized[0] and not _torch.parametrization_cache()[0]

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Sets modes, flags and global hooks to the snapshot inside of the block."""
        with contextlib.ExitStack() as stack:
            if self._mode_state is not None and self._modes != _torch.user_modes():
                stack.enter_context(self._mode_state.replayed())  # modes that were turned off since do not see replays
            stack.enter_context(_torch.under_modes((self._modes[0], (*self._modes[1], *self._observers()))))
            stack.enter_context(_torch.under_flags(self._flags))
            stack.enter_context(_torch.under_global_forward_hooks(self._hooks))
            stack.enter_context(_torch.under_parametrization_cache(self._parametrized))
            yield
