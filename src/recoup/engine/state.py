"""What a second run of a forward must find as the first one found it, and leave as it was.

Random number streams (torch CPU and device, python's, numpy's), autocast, and the buffers a forward changes. Each is
taken when a region is entered and put in place around its replay; afterwards everything is as before the replay.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from recoup import _compat


class RandomState:
    """The random number streams at one moment.

    Python's and numpy's are kept only if `settle()` finds that they moved since: most forwards leave them alone.
    """

    __slots__ = ("_cpu", "_devices", "_numpy", "_python")

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._cpu: torch.Tensor | None = torch.get_rng_state()
        self._devices = [(i, torch.cuda.get_rng_state(i)) for i in _cuda_devices(tensors)]
        self._python: Any = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = numpy.random.get_state() if numpy is not None else None

    def settle(self) -> None:
        """Forgets the streams that have not moved since."""
        if self._python == random.getstate():
            self._python = None
        if self._numpy is not None:
            now = sys.modules["numpy"].random.get_state()
            if now[2] == self._numpy[2] and now[3] == self._numpy[3] and (now[1] == self._numpy[1]).all():
                self._numpy = None
        if self._cpu is not None and torch.equal(self._cpu, torch.get_rng_state()):
            self._cpu = None

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Sets the streams to where they were and, at the end, to where they are now."""
        cpu = torch.get_rng_state() if self._cpu is not None else None
        devices = [(i, torch.cuda.get_rng_state(i)) for i, _ in self._devices]
        python = random.getstate() if self._python is not None else None
        numpy = sys.modules["numpy"].random if self._numpy is not None else None
        numpy_state = numpy.get_state() if numpy is not None else None
        if self._cpu is not None:
            torch.set_rng_state(self._cpu)
        for i, state in self._devices:
            torch.cuda.set_rng_state(state, i)
        if self._python is not None:
            random.setstate(self._python)
        if numpy is not None:
            numpy.set_state(self._numpy)
        try:
            yield
        finally:
            if cpu is not None:
                torch.set_rng_state(cpu)
            for i, state in devices:
                torch.cuda.set_rng_state(state, i)
            if python is not None:
                random.setstate(python)
            if numpy is not None:
                numpy.set_state(numpy_state)


def _cuda_devices(tensors: Iterable[torch.Tensor]) -> list[int]:
    if not _compat.cuda_is_initialized():
        return []
    return sorted({t.get_device() for t in tensors if t.device.type == "cuda"})


class AutocastState:
    """Autocast as it is now, for the CPU and for one device type."""

    __slots__ = ("_states",)

    def __init__(self, device_types: Iterable[str]) -> None:
        self._states = [
            (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), torch.is_autocast_cache_enabled())
            for d in dict.fromkeys(["cpu", *device_types])
            if torch.amp.is_autocast_available(d)
        ]

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Enters the same autocast."""
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype, cache in self._states:
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype, enabled, cache))
            yield


class BufferState:
    """Buffers as they were before a forward that changes them; the replay runs on copies of these.

    The forward's own change is the one that counts: running statistics and counters are updated once. Swapping the
    buffer instead of restoring it keeps the storage that the first forward wrote, and its version, untouched.
    """

    __slots__ = ("_copies",)

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self._copies: list[tuple[nn.Module, str, torch.Tensor]] = []
        for name in names:
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            buffer = owner._buffers.get(leaf)
            if buffer is not None:
                self._copies.append((owner, leaf, buffer.detach().clone()))

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Puts copies in place of the buffers and, at the end, the buffers back."""
        current = [(owner, leaf, owner._buffers[leaf]) for owner, leaf, _ in self._copies]
        for owner, leaf, copy in self._copies:
            owner._buffers[leaf] = copy.clone()
        try:
            yield
        finally:
            for owner, leaf, buffer in current:
                owner._buffers[leaf] = buffer


def statistics_buffers(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of buffers that normalisation layers below `module` update in training."""
    names = []
    for path, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._NormBase) and child.track_running_stats and child.training:
            names += [f"{path}.{leaf}" if path else leaf for leaf, b in child._buffers.items() if b is not None]
    return tuple(names)
