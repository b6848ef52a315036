"""Where offloaded bytes go: one protocol, and the transports that need no GPU."""

from __future__ import annotations

import io
import os
import tempfile
import threading
import zlib
from pathlib import Path
from typing import Any, Protocol

import torch

from recoup.errors import InternalError, UsageError
from recoup.runtime.waiting import Gone


class Transport(Protocol):
    """Moves flat byte tensors away from the device and back.

    `put` and `prefetch` may return before the copy is done; `get` may not: what it returns can be read at once.
    """

    def put(self, flat: torch.Tensor) -> Any:
        """Copies a flat uint8 tensor away and returns what it is asked for by; may hold the tensor until done.

        The bytes are forgotten when nobody holds that handle any more. Nothing of a transport's runs then: what takes
        space outside of Python is taken back at a later call.
        """

    def prefetch(self, handle: Any) -> None:
        """Begins to bring it back."""

    def get(self, handle: Any) -> torch.Tensor:
        """Returns the bytes, a new tensor on the device they came from."""

    def close(self) -> None:
        """Lets go of everything."""


class InlineTransport:
    """Copies in host memory, at once, outside torch's allocator: for tests, and to see what would move."""

    def put(self, flat: torch.Tensor) -> Any:
        """See `Transport`."""
        return [flat.detach().cpu().numpy().copy(), flat.device]

    def prefetch(self, handle: Any) -> None:
        """See `Transport`."""

    def get(self, handle: Any) -> torch.Tensor:
        """See `Transport`."""
        host, device = handle
        return torch.empty(len(host), dtype=torch.uint8, device=device).copy_(torch.from_numpy(host))

    def close(self) -> None:
        """See `Transport`."""


class _File(io.FileIO):
    """Closes itself without a word, and without Python, when nobody holds it."""

    __del__ = io.FileIO.close


class _Extent:
    """What a disk's handle is: where its bytes lie."""

    __slots__ = ("__weakref__", "checksum", "device", "offset", "size")

    def __init__(self, offset: int, size: int, checksum: int, device: torch.device) -> None:
        self.offset = offset
        self.size = size
        self.checksum = checksum
        self.device = device


class DiskTransport:
    """One file without a name in a directory: the system takes it back however the process ends.

    Every block has a checksum; blocks that nobody asks for any more are used again.

    Args:
        directory: on the disk to use; left out: the system's temporary one.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as unnamed:
            self._file = _File(os.dup(unnamed.fileno()), "r+b")
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._gone = Gone()
        self._lock = threading.Lock()  # backward runs on a thread of its own on some devices

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
    """Copies at the last moment, when they are waited for, into memory full of NaN: a missing wait shows on a CPU.

    Args:
        skip_waits: which of the waits (counted from 0, over puts and gets) are left out, as a fault: what is read is
            then what was there before the copy.
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
    """Returns the transport that was asked for.

    Args:
        device: what is moved lies there.
        wanted: "inline", "disk", "cuda", "auto", or a transport.
        host: what "auto" is for a device that is no GPU.

    Raises:
        UsageError: if it is not known, or is not for that device.
    """
    if not isinstance(wanted, str):
        return wanted
    kind = ("cuda" if device.type == "cuda" else host) if wanted == "auto" else wanted
    if kind == "inline":
        return InlineTransport()
    if kind == "disk":
        return DiskTransport()
    if kind == "cuda" and device.type == "cuda":
        from recoup.runtime.offload.cuda import CudaTransport

        return CudaTransport(device)
    raise UsageError(
        f"Unknown transport {wanted!r} for a model on {device}. Choose inline or disk, or cuda for a model on a "
        "GPU. (recoup.runtime.offload.transport)"
    )
