"""How much of a CPU's last cache a process has for itself, found by touching memory between two reads.

A virtual machine is told of the whole cache of a processor whose other cores are other people's: 480 MiB, of which
half a read is gone after 128 MiB of something else. So what an op finds there is not what the system promises, and to
empty the whole takes longer than the ops that are to be timed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from recoup import _torch
from recoup._allocation import available_host_bytes
from recoup.cost.reuse import core_cache_bytes, last_cache_bytes
from recoup.thresholds import MOST_TRIES


def cache_capacity_bytes(path: Path | None) -> int:
    """Returns this process's share of the last cache; the whole where it cannot be told.

    Args:
        path: of the file that keeps the answer (`cache.capacity_path`); None: this process measures for itself.
    """
    if path is None:
        return _measured_bytes()
    with contextlib.suppress(OSError, ValueError):
        if (known := int(path.read_text())) > 0:
            return known
    found, beside = _measured_bytes(), path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(str(found))
        beside.replace(path)
    return found


def flush_bytes(capacity_bytes: int) -> int:
    """Returns the bytes to touch until next to nothing of what was read before is left in the cache."""
    return min(2 * capacity_bytes, last_cache_bytes())


@functools.cache
def _measured_bytes() -> int:
    # Twice of it will be touched between ops, which is no more than half of the memory that there is.
    most_bytes, probe_bytes = min(last_cache_bytes(), available_host_bytes() // 4), 4 * core_cache_bytes()
    if most_bytes < 4 * probe_bytes:
        return most_bytes
    with _torch.without_dispatch_modes():
        probe, other = (torch.ones(n, dtype=torch.uint8, device="cpu") for n in (probe_bytes, most_bytes))
        return _find(probe.view(torch.int64), other)


def _find(probe: torch.Tensor, other: torch.Tensor) -> int:
    """Returns the share, by reads of `probe` after parts of `other` were written."""

    def read_after(nbytes: int) -> float:
        probe.sum()
        other[:nbytes].fill_(1)
        began = time.perf_counter()
        probe.sum()
        return time.perf_counter() - began

    return find_capacity_bytes(read_after, least_bytes=probe.nbytes, most_bytes=other.nbytes)


def find_capacity_bytes(read_after: Callable[[int], float], *, least_bytes: int, most_bytes: int) -> int:
    """Returns after how many bytes of other memory half of what was read before has left; the most, if it cannot tell.

    Args:
        read_after: seconds of reading `least_bytes` after so many other bytes were touched.
    """
    sizes = [most_bytes]
    while (smaller := int(sizes[-1] / math.sqrt(2))) >= 2 * least_bytes:
        sizes.append(smaller)
    sizes = [least_bytes // 2, *reversed(sizes)]
    rounds = [[read_after(nbytes) for nbytes in sizes] for _ in range(MOST_TRIES)]
    seconds = [min(of_one) for of_one in zip(*rounds, strict=True)]  # what else runs on the machine only slows a read
    warm, cold = seconds[0], seconds[-1]
    if cold < 1.25 * warm:
        return most_bytes
    middle = (warm + cold) / 2
    for (below, faster), (above, slower) in itertools.pairwise(zip(sizes, seconds, strict=True)):
        if slower > middle:
            return below + int((above - below) * (middle - faster) / (slower - faster))
    return most_bytes
