"""Memory of one step: the bytes of its state and of its tape, and the workspace of its forward and backward.

Storages made while the meter is on are followed from allocation to free, as in `capture/tracker.py`, but on the real
step. Memory that a kernel allocates and frees internally is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from recoup import _torch


class _Handle(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("key", "size")
    key: int
    size: int


class StepMeter(_torch.dispatch_mode_class()):  # type: ignore[misc]
    """Measures one taped step and its backward.

    The state before the step and the state after it are replaced by copies, so that a freed original shows that the
    tape does not hold it.

    Attributes:
        state_bytes: bytes of the state after the step.
        tape_bytes: bytes that a taped step leaves alive, its final state included.
        in_row_bytes: the same if another taped step follows: the state counts only where one of the tapes saved it.
        forward_bytes: peak of the step's forward beyond the bytes alive before the step.
        backward_bytes: peak of the step's backward beyond its tape and the sums of gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state_bytes = self.tape_bytes = self.in_row_bytes = self.forward_bytes = self.backward_bytes = 0
        self._live: dict[int, _Handle] = {}
        self._died: list[_Handle] = []  # freed but not counted yet; see `runtime.waiting`
        self._entered: list[tuple[int, Any]] = []
        self._states: list[tuple[int, Any]] = []
        self._may_go: dict[int, int] = {}
        self._level = self._peak = self._before = 0

    def __enter__(self) -> StepMeter:
        self._live.clear()
        self._died.clear()
        self._level = self._peak = 0
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self.backward_bytes = self._peak - self._before

    @property
    def level_bytes(self) -> int:
        """Bytes alive now that were allocated since the meter was entered."""
        self._bury()
        return self._level

    def _bury(self) -> None:
        while self._died:
            handle = self._died.pop()
            if self._live.get(handle.key) is handle:
                del self._live[handle.key]
                self._level -= handle.size

    def entered(self, state: list[torch.Tensor]) -> None:
        """Notes the copies that the step starts from; call it before the step."""
        self._entered = self._names(state)
        self._before = self.level_bytes

    def taped(self, states: list[torch.Tensor], excluded: list[torch.Tensor]) -> None:
        """Notes the state after the step and the captured tensors; call it after the step's forward."""
        own = {key: size for key, size in _storages(states).items() if key not in _storages(excluded)}
        self.state_bytes = sum(own.values())
        self.forward_bytes = self._peak - self._before
        self._states = self._names(states)
        entered = {key for key, _ in self._entered}
        self._may_go = {key: size for key, size in own.items() if key in self._live and key not in entered}

    def lightened(self) -> None:
        """Notes the level; call it when the tape holds only its graph."""
        kept = {key: ref().nbytes() for key, ref in self._entered if self._is_alive(key, ref)}
        self.tape_bytes = max(self.level_bytes - sum(kept.values()), 1)

    def parted(self) -> None:
        """Starts to measure the backward; call it when the state after the step has been replaced by copies."""
        kept = {key for key, ref in self._states if self._is_alive(key, ref)}
        pairs = zip(self._states, self._entered)
        kept |= {key for (key, _), before in pairs if self._is_alive(*before)}
        gone = sum(size for key, size in self._may_go.items() if key not in kept)
        self.in_row_bytes = max(self.tape_bytes - gone, 1)
        self._before = self._peak = self.level_bytes

    def working_bytes(self) -> int:
        """Returns the peak bytes of running a step beyond its tape.

        The peak lies in its forward, during which the entered state and the gradient of a later state are alive, or
        in its backward, during which the entered state may be alive.
        """
        forward_bytes = max(self.forward_bytes - self.tape_bytes, 0) + 2 * self.state_bytes
        return max(forward_bytes, self.backward_bytes + self.state_bytes)

    def _names(self, tensors: list[torch.Tensor]) -> list[tuple[int, Any]]:
        self._bury()
        keys = (t.untyped_storage()._cdata if t.layout is torch.strided else 0 for t in tensors)
        return [(key, self._live.get(key)) for key in keys]

    def _is_alive(self, key: int, ref: Any) -> bool:
        self._bury()
        return ref is not None and self._live.get(key) is ref

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self._follow(tensor.untyped_storage(), args)
        return out

    def _follow(self, storage: torch.UntypedStorage, args: Any) -> None:
        self._bury()
        key = storage._cdata
        known = self._live.get(key)
        if known is not None and known() is storage:
            return
        for argument in args:
            is_strided = isinstance(argument, torch.Tensor) and argument.layout is torch.strided
            if is_strided and argument.untyped_storage()._cdata == key:
                return
        size = storage.nbytes()
        handle = _Handle(storage, self._died.append)
        handle.key, handle.size = key, size
        self._live[key] = handle
        self._level += size
        self._peak = max(self._peak, self._level)


def _storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.layout is torch.strided}
