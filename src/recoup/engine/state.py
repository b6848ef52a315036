"""What a second run of a forward must find as the first one found it, and leave as it was.

Random number streams (torch CPU and device, python's, numpy's, explicit generators), autocast, the attributes and hooks
of the modules, and the buffers a forward changes. Each is taken when a region is entered and put in place around its
replay; afterwards everything is as before the replay. `Sample` tells whether a tensor came out as it was.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import random
import sys
import weakref
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

    def put(self) -> None:
        """Sets the streams to where they were, for good."""
        if self._cpu is not None:
            torch.set_rng_state(self._cpu)
        for i, state in self._devices:
            torch.cuda.set_rng_state(state, i)
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def is_settled(self) -> bool:
        """Whether no stream of the host is kept: `settle` found that none moved."""
        return self._cpu is None and self._python is None and self._numpy is None and not self._devices

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


def _state_of(stream: Any) -> Any:
    """Returns the state of an explicit random stream, or None if it is not one."""
    if isinstance(stream, torch.Generator):
        return stream.get_state()
    if isinstance(stream, random.Random):
        return stream.getstate()
    if type(stream).__module__.startswith("numpy.random"):
        if hasattr(stream, "bit_generator"):
            return stream.bit_generator.state
        return stream.get_state() if hasattr(stream, "get_state") else None
    return None


def _set_state(stream: Any, state: Any) -> None:
    if isinstance(stream, random.Random):
        stream.setstate(state)
    elif hasattr(stream, "bit_generator"):
        stream.bit_generator.state = state
    else:
        stream.set_state(state)


class StreamState:
    """Explicit random streams (`torch.Generator`, `random.Random`, numpy's) among some objects."""

    __slots__ = ("_states",)

    def __init__(self, objects: Iterable[Any]) -> None:
        states = [(o, _state_of(o)) for o in objects]
        self._states = [(o, state) for o, state in states if state is not None]

    def put(self) -> None:
        """Sets the streams to where they were, for good."""
        for stream, state in self._states:
            _set_state(stream, state)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Sets the streams to where they were and, at the end, to where they are now."""
        now = [(stream, _state_of(stream)) for stream, _ in self._states]
        for stream, state in self._states:
            _set_state(stream, state)
        try:
            yield
        finally:
            for stream, state in now:
                _set_state(stream, state)


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often the tensor was changed in place; inference tensors do not tell."""
    return 0 if tensor.is_inference() else tensor._version


_HOOKS = frozenset(k for k in nn.Module().__dict__ if "forward" in k or "backward" in k)
_SKIPPED = (frozenset(nn.Module().__dict__) | {"forward"}) - _HOOKS - {"training", "_buffers"}
_ATOMS = frozenset([int, float, bool, str, type(None), tuple, torch.dtype, torch.device])
_CONTAINERS = frozenset([list, dict, set, collections.deque, collections.OrderedDict])


class AttributeState:
    """What modules hold besides parameters and submodules: flags, hooks, lists, tensors such as a membrane potential.

    The replay finds them as the forward found them; containers are shallow copies. A tensor changed in place cannot be
    had back: `changed()` names it.

    Attributes:
        others: objects of unknown kind among the attributes.
    """

    __slots__ = ("_entries", "_tensors", "others")

    def __init__(self, module: nn.Module, own_buffers: Iterable[str]) -> None:
        self._entries: list[tuple[weakref.ref[nn.Module], dict[str, Any], dict[str, tuple[int, Any]]]] = []
        self._tensors: list[tuple[str, torch.Tensor, int]] = []
        self.others: list[Any] = []
        own = frozenset(own_buffers)
        for path, child in module.named_modules():
            kept: dict[str, Any] = {}
            copies: dict[str, tuple[int, Any]] = {}
            for key, value in child.__dict__.items():
                if key in _SKIPPED:
                    continue
                kept[key] = value
                kind = type(value)
                if kind in _ATOMS:
                    continue
                if kind in _CONTAINERS:
                    copies[key] = (id(value), value.copy())
                    if key == "_buffers":
                        prefix = f"{path}." if path else ""
                        self._tensors += [
                            (prefix + leaf, b, version_of(b))
                            for leaf, b in value.items()
                            if b is not None and prefix + leaf not in own
                        ]
                elif isinstance(value, torch.Tensor):
                    self._tensors.append((f"{path}.{key}" if path else key, value, version_of(value)))
                else:
                    self.others.append(value)
            self._entries.append((weakref.ref(child), kept, copies))

    def changed(self) -> str:
        """Returns the name of a tensor that was changed in place since, or ""."""
        return next((name for name, t, version in self._tensors if version_of(t) != version), "")

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Puts the attributes in place and, at the end, the present ones back."""
        present = []
        shared: dict[int, Any] = {}
        for ref, kept, copies in self._entries:
            child = ref()
            if child is None:
                continue
            present.append((child.__dict__, {k: v for k, v in child.__dict__.items() if k not in _SKIPPED}))
            entry = dict(kept)
            for key, (identity, copy) in copies.items():
                entry[key] = shared.setdefault(identity, copy.copy())
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    entry[key] = value.detach().requires_grad_()
            _put(child.__dict__, entry)
        try:
            yield
        finally:
            for attributes, now in present:
                _put(attributes, now)


def _put(attributes: dict[str, Any], values: dict[str, Any]) -> None:
    for key in [k for k in attributes if k not in values and k not in _SKIPPED]:
        del attributes[key]
    attributes.update(values)


class Sample:
    """A few bytes of a tensor in host memory, read without any op: two runs of a forward are compared by them."""

    __slots__ = ("_bytes",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = _read(tensor)

    def matches(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has these values, floats up to what a different order of summation does."""
        found = _read(tensor)
        if found == self._bytes or not found or not self._bytes or len(found) != len(self._bytes):
            return True
        if not tensor.is_floating_point():
            return False
        with _compat.without_dispatch_modes(), torch.no_grad():
            a, b = (torch.frombuffer(bytearray(x), dtype=tensor.dtype).double() for x in (self._bytes, found))
            size = float(torch.maximum(a.abs(), b.abs()).nan_to_num(0.0, 0.0, 0.0).max())
            return torch.allclose(a, b, rtol=0.0, atol=size * torch.finfo(tensor.dtype).eps ** 0.5, equal_nan=True)


_SAMPLED = frozenset(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool]
)
_SAMPLE_BYTES = 64


def _read(tensor: torch.Tensor) -> bytes:
    """Returns bytes from the start, the middle and the end; none of what is not plain host memory."""
    kind = type(tensor)
    if (kind is not torch.Tensor and kind is not nn.Parameter) or tensor.dtype not in _SAMPLED:
        return b""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.numel() == 0:
        return b""
    start, width = tensor.data_ptr(), tensor.element_size()
    if not tensor.is_contiguous():
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return ctypes.string_at(start, width) + ctypes.string_at(start + last * width, width)
    size = tensor.numel() * width
    if size <= 3 * _SAMPLE_BYTES:
        return ctypes.string_at(start, size)
    middle = start + size // 2 // 8 * 8
    return b"".join(ctypes.string_at(at, _SAMPLE_BYTES) for at in (start, middle, start + size - _SAMPLE_BYTES))


def statistics_buffers(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of buffers that normalisation layers below `module` update in training."""
    names = []
    for path, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._NormBase) and child.track_running_stats and child.training:
            names += [f"{path}.{leaf}" if path else leaf for leaf, b in child._buffers.items() if b is not None]
    return tuple(names)
