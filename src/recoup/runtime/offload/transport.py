"""Where offloaded bytes are kept: the protocol, and the transports that need no GPU."""

from __future__ import annotations

import io
import os
import tempfile
import threading
import zlib
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch

from recoup._allocation import HostRoom
from recoup.errors import InternalError, UsageError
from recoup.runtime.waiting import Gone


class Transport(Protocol):
    """Moves flat byte tensors away from the device and back.

    `put` and `prefetch` may return before the copy is done; the result of `get` can be read at once.
    """

    def put(self, flat: torch.Tensor) -> Any:
        """Copies a flat uint8 tensor out and returns a handle on it; may hold the tensor until the copy is done.

        The bytes are freed when the handle is. No code of the transport may run at that moment: space outside of
        Python is reclaimed at a later call.
        """

    def prefetch(self, handle: Any) -> None:
        """Starts to copy the bytes back."""

    def get(self, handle: Any) -> torch.Tensor:
        """Returns the bytes as a new flat uint8 tensor on the device they came from."""

    def close(self) -> None:
        """Frees all resources."""


class InlineTransport:
    """Copies synchronously to host memory outside of torch's allocator: for tests, and to see what would move."""

    def __init__(self) -> None:
        self._room = HostRoom()

    def put(self, flat: torch.Tensor) -> Any:
        """See `Transport`."""
        self._room.check(flat.numel(), "a tensor saved for backward")
        host = numpy.empty(flat.numel(), dtype=numpy.uint8)
        torch.from_numpy(host).copy_(flat.detach())
        return [host, flat.device]

    def prefetch(self, handle: Any) -> None:
        """See `Transport`."""

    def get(self, handle: Any) -> torch.Tensor:
        """See `Transport`."""
        host, device = handle
        return torch.empty(len(host), dtype=torch.uint8, device=device).copy_(torch.from_numpy(host))

    def close(self) -> None:
        """See `Transport`."""


class _File(io.FileIO):
    """A file that is closed without a warning, and without running Python code, when it is freed."""

    __del__ = io.FileIO.close


class _Extent:
    """Handle of `DiskTransport`: offset, size and checksum of the bytes."""

    __slots__ = ("__weakref__", "checksum", "device", "offset", "size")

    def __init__(self, offset: int, size: int, checksum: int, device: torch.device) -> None:
        self.offset = offset
        self.size = size
        self.checksum = checksum
        self.device = device


class DiskTransport:
    """Copies to one unnamed file in a directory, which the system removes however the process ends.

    Every block has a checksum; blocks without a handle are reused.

    Args:
        directory: directory on the disk to use; default: the system's temporary directory.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as unnamed:
            self._file = _File(os.dup(unnamed.fileno()), "r+b")
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._gone = Gone()
        self._lock = threading.Lock()  # on some devices backward runs on another thread

    def put(self, flat: torch.Tensor) -> Any:
        """See `Transport`."""
        view = memoryview(flat.detach().cpu().numpy())  # type: ignore[arg-type]
        with self._lock:
            size = len(view)
            for freed, at in self._gone.take():
                self._free.setdefault(freed, []).append(at)
            spare = self._free.get(size)
            offset = spare.pop() if spare else self._end
            self._end = max(self._end, offset + size)
            self._file.seek(offset)
            written = 0
            while written < size:
                written += self._file.write(view[written:]) or 0
        extent = _Extent(offset, size, zlib.crc32(view), flat.device)
        self._gone.watch(extent, (size, offset))
        return extent

    def prefetch(self, handle: Any) -> None:
        """See `Transport`."""

    def get(self, handle: Any) -> torch.Tensor:
        """See `Transport`."""
        offset, size = handle.offset, handle.size
        host = torch.empty(size, dtype=torch.uint8)
        view = memoryview(host.numpy())  # type: ignore[arg-type]
        with self._lock:
            self._file.seek(offset)
            read = 0
            while read < size:
                count = self._file.readinto(view[read:])
                if not count:
                    break
                read += count
        if read != size or zlib.crc32(view) != handle.checksum:
            raise InternalError(
                f"Offloaded bytes came back changed: {read} of {size} bytes read at {offset}, checksum does not match. "
                "Is the disk full or failing? (recoup.runtime.offload.transport)"
            )
        return host.to(handle.device)

    def close(self) -> None:
        """See `Transport`."""
        self._file.close()


class DelayedTransport:
    """Delays every copy until it is waited for, into memory full of NaN: makes a missing wait visible on a CPU.

    Args:
        skip_waits: indices of waits (from 0, over puts and gets) to leave out, as faults: the reader then sees the
            memory as it was before the copy.
    """

    def __init__(self, *, skip_waits: frozenset[int] = frozenset()) -> None:
        self.num_waits = 0
        self._skip = skip_waits

    def _wait(self, source: torch.Tensor, target: torch.Tensor) -> None:
        number, self.num_waits = self.num_waits, self.num_waits + 1
        if number not in self._skip:
            target.copy_(source)

    def put(self, flat: torch.Tensor) -> Any:
        """See `Transport`."""
        return {"source": flat.detach(), "host": torch.full_like(flat, 255), "back": None}

    def prefetch(self, handle: Any) -> None:
        """See `Transport`."""
        if handle["source"] is not None:
            self._wait(handle["source"], handle["host"])
            handle["source"] = None
        if handle["back"] is None:
            handle["back"] = torch.full_like(handle["host"], 255)

    def get(self, handle: Any) -> torch.Tensor:
        """See `Transport`."""
        self.prefetch(handle)
        target, handle["back"] = handle["back"], None
        self._wait(handle["host"], target)
        return target  # type: ignore[no-any-return]

    def close(self) -> None:
        """See `Transport`."""


def make_transport(device: torch.device, wanted: Transport | str, *, host: str = "disk") -> Transport:
    """Returns the requested transport.

    Args:
        device: device of the tensors to move.
        wanted: "inline", "disk", "cuda", "auto", or a `Transport`.
        host: the meaning of "auto" on a device other than a GPU.

    Raises:
        UsageError: if the transport is unknown, or does not serve that device.
    """
    check_transport(device, wanted)
    if not isinstance(wanted, str):
        return wanted
    kind = ("cuda" if device.type == "cuda" else host) if wanted == "auto" else wanted
    if kind == "inline":
        return InlineTransport()
    if kind == "disk":
        return DiskTransport()
    from recoup.runtime.offload.cuda import CudaTransport

    return CudaTransport(device)


def check_transport(device: torch.device, wanted: Transport | str) -> None:
    """Raises UsageError if `wanted` is no transport for tensors on a device; makes none."""
    known = ("auto", "inline", "disk", *(("cuda",) if device.type == "cuda" else ()))
    methods = ("put", "prefetch", "get", "close")
    if wanted not in known if isinstance(wanted, str) else not all(callable(getattr(wanted, m, None)) for m in methods):
        raise UsageError(
            f"Unknown transport {wanted!r} for a model on {device}. Choose inline or disk, cuda for a model on a GPU, "
            f"or an object with {', '.join(methods)}. (recoup.runtime.offload.transport)"
        )
