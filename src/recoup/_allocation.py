"""Memory that is there to be allocated, and the errors that say there is none left."""

from __future__ import annotations

import ctypes
import enum
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from recoup.thresholds import ESTIMATE_SHARE
from recoup.units import format_bytes

# A CPU's allocator, its kernels' scratch memory (C++, oneDNN) and drivers say it in words alone.
_WORDS = (
    "allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "bad allocation",
    "could not create a memory",
    "could not create a primitive",
    # cuDNN, once none of its algorithms got the workspace that it asked for.
    "find a valid cuDNN algorithm",
    "unable to find an engine",
)


class MallocParameter(enum.IntEnum):
    """What `mallopt` sets, as in malloc.h of the GNU C library."""

    TRIM_THRESHOLD = -1
    TOP_PAD = -2
    MMAP_THRESHOLD = -3
    MMAP_MAX = -4
    ARENA_MAX = -8


LARGE_BLOCK_BYTES = 1 << 18
"""Blocks from here on are mapped by themselves (where memory is limited), so that freeing one gives it back."""


class HostMemoryError(MemoryError):
    """Host memory that was not taken, because it is not there; the message has the numbers."""


class HostRoom:
    """The host memory that is available, less a margin for what else runs there.

    The system hands out memory that it does not have, and ends a process that writes to it: so it is asked before.
    """

    def __init__(self) -> None:
        self._margin_bytes = int(available_host_bytes() * ESTIMATE_SHARE)

    def check(self, nbytes: int, what: str) -> None:
        """Raises HostMemoryError unless `nbytes` more can be allocated for `what`."""
        left = available_host_bytes()
        if nbytes > left - self._margin_bytes:
            raise HostMemoryError(
                f"{what} needs {format_bytes(nbytes)} of host memory, and {format_bytes(left)} are available, of which "
                f"{format_bytes(self._margin_bytes)} are left to others"
            )


def is_allocation_failure(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that memory could not be allocated, on any device."""
    return any(map(_says_no_memory, _causes(error)))


def host_memory_error(error: BaseException | None) -> HostMemoryError | None:
    """Returns the HostMemoryError that an error is or was raised from, if there is one."""
    return next((e for e in _causes(error) if isinstance(e, HostMemoryError)), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and those that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _says_no_memory(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS):
        return True
    return isinstance(error, (torch.OutOfMemoryError, MemoryError))


def available_bytes(device: torch.device) -> int:
    """Returns the bytes that can still be allocated on a device by this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        limit = int(total * torch.cuda.get_per_process_memory_fraction(device))  # what this process may reserve
        return min(int(free), limit - reserved) + reserved - torch.cuda.memory_allocated(device)
    return available_host_bytes()


def available_host_bytes() -> int:
    """Returns the host memory that is available now: of the machine, its container, and this process's own limit."""
    bounds = [_of_the_machine()]
    for used, limit in (
        ("memory.current", "memory.max"),
        ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes"),
    ):
        try:
            bounds.append(int(_read(f"/sys/fs/cgroup/{limit}")) - int(_read(f"/sys/fs/cgroup/{used}")))
        except (OSError, ValueError):  # no such container, or no limit ("max")
            continue
    limited = address_space_left()
    return max(min(bounds if limited is None else [*bounds, limited]), 0)


def address_space_left() -> int | None:
    """Returns the bytes of address space that this process may still map; None if it has no limit."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        return limit - int(_read("/proc/self/statm").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return limit


def _of_the_machine() -> int:
    try:
        for line in _read("/proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


def _read(path: str) -> str:
    return Path(path).read_text()


def return_freed_memory() -> None:
    """Has the C allocator give large blocks back when they are freed, if this process's address space is limited.

    glibc serves blocks of up to 32 MiB from a heap that shrinks from its end only: a small block that outlives a step
    keeps hundreds of freed MiB in the address space, in pieces that the next step's tensors may not fit into. And
    each thread (the profiler's) reserves 64 MiB for a heap of its own. A setting from the environment wins.
    """
    if address_space_left() is None or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        library = ctypes.CDLL(None)
        library.mallopt(MallocParameter.MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        library.mallopt(MallocParameter.ARENA_MAX, 1)
        library.malloc_trim(0)
    except (OSError, AttributeError):  # another C library
        return
