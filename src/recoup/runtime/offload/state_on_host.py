"""Where an offloaded optimizer state is kept, and a mapping that waits for pending copies when it is read."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Protocol

import torch


class Host(Protocol):
    """Keeps optimizer state between steps.

    Attributes:
        is_behind: whether copies may still run after `finish`, so that a reader has to call `wait`.
    """

    is_behind: bool

    def leave(self, tensor: torch.Tensor, there: Any | None) -> Any:
        """Copies a tensor to the host; `there` is the earlier result for it, whose memory is reused."""

    def back(self, there: Any, device: torch.device) -> torch.Tensor:
        """Returns a new tensor on the device with the contents of `there`."""

    def finish(self) -> None:
        """Is called after the last copy of a step, or of the whole state."""

    def wait(self) -> None:
        """Blocks until the tensors on the host may be read."""


class PinnedHost:
    """Pinned memory, for a GPU; copies are asynchronous."""

    is_behind = True

    def __init__(self) -> None:
        self._copied: dict[torch.device, torch.cuda.Event] = {}  # after the last copies, until somebody waited
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
            self._copied[device].wait(torch.cuda.current_stream(device))  # may not be the stream that copied
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
    """Unnamed files in the temporary directory, mapped into memory: for a CPU, where the host is the disk."""

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
    """Size, stride and dtype of a tensor without data, from which another is made."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.nbytes = tensor.numel() * tensor.dtype.itemsize
        self.make = (tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype)


class NotedHost:
    """Stand-in while a step is captured: nothing is copied."""

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
    """An optimizer's `state` that waits for pending copies before it is read.

    Attributes:
        host: the host to wait for; None during the optimizer's own step.
    """

    def __init__(self, state: defaultdict[Any, Any], host: Host | None) -> None:
        super().__init__(dict, state)
        self._former = state
        self.host = host

    def removed(self) -> defaultdict[Any, Any]:
        """Returns the original mapping with the current contents."""
        self._former.clear()
        self._former.update(self)
        return self._former

    def _wait(self) -> None:
        if self.host is not None:
            self.host.wait()

    def __getitem__(self, key: Any) -> Any:
        self._wait()
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:  # without it `dict(state)` would read the items past us
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
