"""Random streams and autocast: noted when a region is entered, restored for its replay.

The streams are torch's for the CPU and the device, Python's, NumPy's and explicit generators. After the replay the
current states are put back. State of modules and arguments is in `module_state.py`.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from recoup import _torch


class RandomState:
    """Snapshot of the global random streams.

    `settle()` drops those of the host that have not advanced, which is the case for most forwards. The CPU stream's
    state is kept as bytes, so that it does not show in memory measurements.
    """

    __slots__ = ("_cpu", "_devices", "_numpy", "_python")

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._cpu: bytes | None = _cpu_state()
        self._devices = [(i, torch.cuda.get_rng_state(i)) for i in _cuda_devices(tensors)]
        self._python: Any = _python_stream.state()
        self._numpy: Any = _numpy_stream.state()

    def settle(self) -> None:
        """Drops the states of streams that have not advanced since."""
        if self._python is not None:
            state = _python_stream.state()
            if state is self._python or state == self._python:
                self._python = None
        if self._numpy is not None:
            now = _numpy_stream.state()
            if now is self._numpy or _is_same(now, self._numpy):
                self._numpy = None
        if self._cpu is not None and self._cpu == _cpu_state():
            self._cpu = None

    def put(self) -> None:
        """Sets the streams to the snapshot."""
        if self._cpu is not None:
            _set_cpu_state(self._cpu)
        for i, state in self._devices:
            torch.cuda.set_rng_state(state, i)
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def is_settled(self) -> bool:
        """Whether no state of a host stream is kept, because none has advanced."""
        return self._cpu is None and self._python is None and self._numpy is None and not self._devices

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Sets the streams to the snapshot inside of the block, and to their current states at its end."""
        cpu = _cpu_state() if self._cpu is not None else None
        devices = [(i, torch.cuda.get_rng_state(i)) for i, _ in self._devices]
        python = random.getstate() if self._python is not None else None
        numpy = sys.modules["numpy"].random if self._numpy is not None else None
        numpy_state = numpy.get_state() if numpy is not None else None
        try:
            if self._cpu is not None:
                _set_cpu_state(self._cpu)
            for i, state in self._devices:
                torch.cuda.set_rng_state(state, i)
            if self._python is not None:
                random.setstate(self._python)
            if numpy is not None:
                numpy.set_state(self._numpy)
            yield
        finally:
            if cpu is not None:
                _set_cpu_state(cpu)
            for i, state in devices:
                torch.cuda.set_rng_state(state, i)
            if python is not None:
                random.setstate(python)
            if numpy is not None:
                numpy.set_state(numpy_state)


_STATE_BYTES = 4 * len(random.getstate()[1])  # of MT19937, Python's and NumPy's: 624 words and a position


class _NumpyStream:
    """NumPy's global stream. Reading its state takes 50 us, so it is read again only if the stream has advanced.

    Whether it has is seen by comparing the generator's memory with the layout that the last state would have there. If
    NumPy's layout is another one, they never agree and the state is read each time. The memory does not show a cached
    second normal number; while there is one, the state is read each time too.
    """

    def __init__(self) -> None:
        self._last: tuple[bytes, Any] = b"", None  # memory and state, set as one: threads share this
        self._memory: tuple[Any, Any] = None, None  # generator, and a view of its words; None: it is another kind

    def state(self) -> Any:
        """Returns `numpy.random.get_state()`, the same object if the stream did not move; None without NumPy."""
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return None
        generator = numpy.random.get_bit_generator()
        of, memory = self._memory
        if of is not generator:
            is_known = type(generator).__name__ == "MT19937"
            memory = _words_at(generator.ctypes.state_address) if is_known else None
            self._memory = generator, memory
        if memory is None:
            return numpy.random.get_state()
        raw = memory.raw
        known, state = self._last
        if state is None or state[3] or raw != known:
            state = numpy.random.get_state()
            self._last = state[1].tobytes() + int(state[2]).to_bytes(4, sys.byteorder), state
        return state


_numpy_stream = _NumpyStream()


class _PythonStream:
    """Python's global stream. Reading its state takes 20 us, so it is read again only if the stream has advanced.

    Whether it has is seen as for NumPy's: CPython keeps a position and 624 words behind the object's header.
    """

    _offset_bytes = object.__basicsize__
    _is_readable = sys.implementation.name == "cpython" and random.Random.__basicsize__ >= _offset_bytes + _STATE_BYTES

    def __init__(self) -> None:
        self._last: tuple[bytes, Any] = b"", None  # memory and state, set as one: threads share this
        self._memory: tuple[Any, Any] = None, None  # stream, and a view of its words; None: it is another kind

    def state(self) -> Any:
        """Returns `random.getstate()`, the same object if the stream did not move."""
        stream = getattr(random.getstate, "__self__", None)
        of, memory = self._memory
        if of is not stream or stream is None:
            is_known = type(stream) is random.Random and self._is_readable
            memory = _words_at(id(stream) + self._offset_bytes) if is_known else None
            self._memory = stream, memory
        if memory is None:
            return random.getstate()
        raw = memory.raw
        held_back = getattr(stream, "gauss_next", None)  # a cached second normal number
        known, state = self._last
        if state is None or raw != known or held_back is not None or state[2] is not None:
            state = random.getstate()
            words = state[1]
            self._last = array.array("I", (words[-1], *words[:-1])).tobytes(), state
        return state


_python_stream = _PythonStream()


def _words_at(address: int) -> Any:
    return (ctypes.c_char * _STATE_BYTES).from_address(address)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two states of NumPy's stream are equal: position, cached number, words."""
    return bool(one[2] == other[2] and one[3] == other[3] and (one[1] == other[1]).all())


# Read and written by address: anything else is an op, which dispatch modes, fake tensors and lineage would see.
def _cpu_state() -> bytes:
    state = torch.get_rng_state()
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _set_cpu_state(saved: bytes) -> None:
    state = torch.get_rng_state()
    ctypes.memmove(state.data_ptr(), saved, len(saved))
    torch.set_rng_state(state)


def _cuda_devices(tensors: Iterable[torch.Tensor]) -> list[int]:
    if not _torch.cuda_is_initialized():
        return []
    # The current device too: a forward may draw there without an argument on it (a call inside of a span).
    return sorted({torch.cuda.current_device(), *(t.get_device() for t in tensors if t.device.type == "cuda")})


class AutocastState:
    """Autocast as it is now, for the CPU, for CUDA where it is in use, and for other device types."""

    __slots__ = ("_others", "_states")

    def __init__(self, device_types: Iterable[str]) -> None:
        self._others = tuple(device_types)
        self._states = self._now() if _torch.is_autocast() else None  # None: it is off for all

    def _now(self) -> list[tuple[str, bool, torch.dtype, bool]]:
        return [
            (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), torch.is_autocast_cache_enabled())
            for d in dict.fromkeys(["cpu", *(["cuda"] if _torch.cuda_is_initialized() else []), *self._others])
            if torch.amp.is_autocast_available(d)
        ]

    def is_off(self) -> bool:
        """Whether it was off and is off now: there is nothing to enter."""
        return self._states is None and not _torch.is_autocast()

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Enters the same autocast."""
        states = self._states or [(device, False, dtype, cache) for device, _, dtype, cache in self._now()]
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype, cache in states:
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype, enabled, cache))
            yield


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

    def __bool__(self) -> bool:
        return bool(self._states)

    def restore(self) -> None:
        """Sets the streams to the snapshot."""
        for stream, state in self._states:
            _set_state(stream, state)

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Sets the streams to the snapshot inside of the block, and to their current states at its end."""
        now = [(stream, _state_of(stream)) for stream, _ in self._states]
        try:
            self.restore()
            yield
        finally:
            for stream, state in now:
                _set_state(stream, state)


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often the tensor was changed in place; inference tensors do not tell."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns `version_of` each tensor."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # there are inference tensors among them
        return list(map(version_of, tensors))


def statistics_buffers(modules: Iterable[tuple[str, nn.Module]]) -> tuple[str, ...]:
    """Returns the paths of buffers that normalisation layers among (path, module) update in training."""
    names = []
    for path, child in modules:
        if isinstance(child, nn.modules.batchnorm._NormBase) and child.track_running_stats and child.training:
            names += [f"{path}.{leaf}" if path else leaf for leaf, b in child._buffers.items() if b is not None]
    return tuple(names)
