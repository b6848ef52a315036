"""Has the C allocator keep freed memory, so that step times compare steps and not page faults."""

from __future__ import annotations

import ctypes
import os
import sys


def keep_freed_memory() -> bool:
    """Asks glibc to serve large blocks from its heap and never give it back; returns whether it will.

    Otherwise each large tensor is a fresh mapping whose pages fault on first touch: a plan that allocates less then
    looks faster than it is. Settings from the environment win. Peak bytes are metered in the allocator's events and
    do not change.
    """
    from recoup._allocation import (  # with torch, not needed for `--help`
        MallocParameter,
        address_space_left,
        return_freed_memory,
    )

    if address_space_left() is not None:  # a heap that is never given back wastes what is limited
        return_freed_memory()
        return False
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    settings = ((MallocParameter.MMAP_MAX, 0), (MallocParameter.TRIM_THRESHOLD, -1))
    return all([mallopt(name, value) == 1 for name, value in settings])
