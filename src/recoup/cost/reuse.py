"""How much of what an op reads has left the cache since the step touched it last.

By reuse distance (Mattson et al., Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2), 1970): what
was touched less than a cache's bytes ago is there still. A step of a small cell reads little else, one of large
activations nothing; both run the same ops.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recoup.cost.op_replay import extent_bytes
from recoup.ir.trace import Signature, TensorSpec, Trace
from recoup.thresholds import SAME_SHARE
from recoup.units import parse_bytes


def last_cache_bytes() -> int:
    """Returns the bytes of a CPU's last cache; what many have, where the system does not say."""
    return max(_cache_sizes(), default=1 << 25)


def core_cache_bytes() -> int:
    """Returns the bytes of the largest cache before that, which a core has for itself; what many have, likewise."""
    return max(_cache_sizes() - {last_cache_bytes()}, default=1 << 20)


@functools.cache
def _cache_sizes() -> frozenset[int]:
    sizes = set()
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.add(parse_bytes(file.read_text().strip() + "iB"))
    return frozenset(sizes)


def interpreter_coldness(trace: Trace) -> float:
    """Returns, from 0 to 1, how far a step's kernels drive the interpreter's data out of its core's cache.

    The square of the share of it that an op moves on average: 1 for ops of some megabytes, next to nothing for small
    cells.
    """
    moved = [nbytes for op in trace.ops if (nbytes := trace.signatures[op.signature].bytes_moved)]
    mean_bytes = sum(moved) / max(len(moved), 1)
    return min(mean_bytes / core_cache_bytes(), 1.0) ** 2


def cold_shares(trace: Trace, cache_bytes: int) -> list[float]:
    """Returns of each op the share of the bytes it reads that lie in no cache of so many bytes; 1 if it reads none."""
    touched: dict[int, int] = {}  # what all ops so far had moved when a storage was touched last
    moved_bytes, shares = 0, []
    for op in trace.ops:
        signature = trace.signatures[op.signature]
        read = cold = 0
        for index in op.inputs:
            nbytes = min(trace.storages[index].nbytes, signature.bytes_moved)  # it may read a part
            read += nbytes
            if index not in touched or moved_bytes - touched[index] + nbytes > cache_bytes:
                cold += nbytes
        shares.append(cold / read if read else 1.0)
        if signature.is_view:  # touches nothing
            continue
        moved_bytes += signature.bytes_moved
        for index in (*op.inputs, *op.outputs):
            touched[index] = moved_bytes
    return shares


def may_be_warm(signature: Signature, cache_bytes: int) -> bool:
    """Whether some of what an op reads can be in a cache of so many bytes."""
    sizes = [extent_bytes(spec) for spec in _specs((signature.args, tuple(v for _, v in signature.kwargs)))]
    return sum(b for b in sizes if b <= cache_bytes) > SAME_SHARE * sum(sizes)


def _specs(nest: Any) -> Iterator[TensorSpec]:
    if isinstance(nest, TensorSpec):
        yield nest
    elif isinstance(nest, (list, tuple)):
        for item in nest:
            yield from _specs(item)
