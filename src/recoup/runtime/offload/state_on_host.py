"""Where an optimizer's state is between its steps, and the mapping that waits for it when it is read."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Protocol

import torch


class Host(Protocol):
    """Where state is between steps.

    Attributes:
        is_behind: whether copies may go on after `finish`, so that whoever reads has to `wait`.
    """

    is_behind: bool

    def leave(self, tensor: torch.Tensor, there: Any | None) -> Any:
        """Copies a tensor to the host; `there` is what an earlier call returned for it, whose memory is used again."""

    def back(self, there: Any, device: torch.device) -> torch.Tensor:
        """Returns the tensor, a new one on the device."""

    def finish(self) -> None:
        """Called after the last copy of a step, or of all state."""

    def wait(self) -> None:
        """Returns when what is on the host may be read."""


class PinnedHost:
    """Pinned memory, for a GPU, whose stream the host does not wait for."""

    is_behind = True

    def __init__(self) -> None:
        self._copied: dict[torch.device, torch.cuda.Event] = {}  # behind the last copies, while nobody waited for them
        self._leaving: set[torch.device] = set()

    def leave(self, tensor: torch.Tensor, there: Any | None) -> Any:
        """See `Host`."""
        if there is None:
            there = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._leaving.add(tensor.device)
        return there.copy_(tensor, non_blocking=True)

    def back(self, there: Any, device: torch.device) -> torch.Tensor:
        """See `Host`."""
        if device in self._copied:
            self._copied[device].wait(torch.cuda.current_stream(device))  # which may be another one now
        return torch.empty_like(there, device=device, pin_memory=False).copy_(there, non_blocking=True)

    def finish(self) -> None:
        """See `Host`."""
        for device in self._leaving:
            self._copied[device] = torch.cuda.current_stream(device).record_event()
        self._leaving.clear()

    def wait(self) -> None:
        """See `Host`."""
        for event in self._copied.values():
            event.synchronize()
        self._copied.clear()


class FileHost:
    """Files without a name in the temporary directory, mapped into memory: for a CPU, whose host is the disk."""

    is_behind = False

    def leave(self, tensor: torch.Tensor, there: Any | None) -> Any:
        """See `Host`."""
        if there is None:
            handle, name = tempfile.mkstemp()
            os.close(handle)
            flat = torch.from_file(name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
            os.unlink(name)
            there = flat.as_strided(tensor.size(), tensor.stride())
        return there.copy_(tensor)

    def back(self, there: Any, device: torch.device) -> torch.Tensor:
        """See `Host`."""
        return torch.empty_like(there, device=device).copy_(there)

    def finish(self) -> None:
        """See `Host`."""

    def wait(self) -> None:
        """See `Host`."""


class _Noted:
    """What a tensor without data leaves behind: how to make another."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.nbytes = tensor.numel() * tensor.dtype.itemsize
        self.make = (tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype)


class NotedHost:
    """Stands in while a step is captured: nothing is copied, and the host's memory is no tensor."""

    is_behind = False

    def leave(self, tensor: torch.Tensor, there: Any | None) -> Any:
        """See `Host`."""
        return _Noted(tensor)

    def back(self, there: Any, device: torch.device) -> torch.Tensor:
        """See `Host`."""
        size, stride, dtype = there.make
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def finish(self) -> None:
        """See `Host`."""

    def wait(self) -> None:
        """See `Host`."""


class WaitingState(defaultdict[Any, Any]):
    """An optimizer's `state`: whoever asks it for something waits until the host has it.

    Attributes:
        host: what is waited for; None in the step of the optimizer itself.
    """

    def __init__(self, state: defaultdict[Any, Any], host: Host | None) -> None:
        super().__init__(dict, state)
        self._former = state
        self.host = host

    def removed(self) -> defaultdict[Any, Any]:
        """Returns the mapping that was there before, with what is here now."""
        self._former.clear()
        self._former.update(self)
        return self._former

    def _wait(self) -> None:
        if self.host is not None:
            self.host.wait()

    def __getitem__(self, key: Any) -> Any:
        self._wait()
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:  # also of `dict(state)`, which would not ask for items otherwise
        self._wait()
        return super().__iter__()

    def __reduce__(self) -> Any:  # a copy, or a pickle, is the plain mapping
        self._wait()
        return defaultdict, (dict,), None, None, iter(dict.items(self))

    def get(self, key: Any, default: Any = None) -> Any:
        """See `dict`."""
        self._wait()
        return super().get(key, default)

    def items(self) -> Any:
        """See `dict`."""
        self._wait()
        return super().items()

    def values(self) -> Any:
        """See `dict`."""
        self._wait()
        return super().values()

    def pop(self, *args: Any) -> Any:
        """See `dict`."""
        self._wait()
        return super().pop(*args)
