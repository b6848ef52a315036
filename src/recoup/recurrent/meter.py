"""What one step takes: the bytes of its state and of its tape, and the working memory of its forward and backward.

Storages that are made while the meter is on are followed from birth to death, as in `capture/tracker.py`, on the real
step. What a kernel allocates and frees within itself is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from recoup import _compat
from recoup.recurrent.tape import Tape


class StepMeter(_compat.dispatch_mode_class()):  # type: ignore[misc]
    """Follows storages through one taped step and its backward.

    Attributes:
        state_bytes: of the state a step comes to. tape_bytes: what a taped step leaves behind, its state included.
        forward_bytes, backward_bytes: the most alive in the step's forward and in its backward, above what was there
            before the step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state_bytes = self.tape_bytes = self.forward_bytes = self.backward_bytes = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._level = self._peak = 0

    def __enter__(self) -> StepMeter:
        self._live.clear()
        self._level = self._peak = 0
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self.backward_bytes = self._peak

    def taped(self, tape: Tape, excluded: list[torch.Tensor]) -> None:
        """Called between forward and backward."""
        outputs = _storages(tape.outputs)
        states = _storages(tape.states)
        own = {key: size for key, size in states.items() if key not in _storages(excluded)}
        self.state_bytes = sum(own.values())
        only_output = sum(size for key, size in outputs.items() if key not in states and key in self._live)
        self.forward_bytes = self._peak
        self.tape_bytes = max(self._level, only_output, 1)
        self._peak = self._level

    def working_bytes(self) -> int:
        """Returns the most that running a step needs besides its tape: its own state and gradients of it included."""
        peak = max(self.forward_bytes, self.backward_bytes)
        return max(peak - self.tape_bytes, 0) + self.state_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self._follow(tensor.untyped_storage(), args)
        return out

    def _follow(self, storage: torch.UntypedStorage, args: Any) -> None:
        key = storage._cdata
        known = self._live.get(key)
        if known is not None and known() is storage:
            return
        for argument in args:
            is_strided = isinstance(argument, torch.Tensor) and argument.layout is torch.strided
            if is_strided and argument.untyped_storage()._cdata == key:
                return
        size = storage.nbytes()

        def died(ref: Any, self: StepMeter = self, key: int = key, size: int = size) -> None:
            if self._live.get(key) is ref:
                del self._live[key]
                self._level -= size

        self._live[key] = weakref.ref(storage, died)
        self._level += size
        self._peak = max(self._peak, self._level)


def _storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.layout is torch.strided}
