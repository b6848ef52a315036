"""What copies to the host and back cost: a link that fills up, and the time that does not hide behind compute.

Copies out run one after the other, so do copies back, each way beside compute where the device has copy engines. The
step waits where it needs a storage that is not back yet, and a storage that is moved away keeps its memory until its
copy is done. Without copy engines (a CPU and its disk) the step waits for each copy.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools

from recoup.cost.model import PricedTrace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way to host memory.

    Attributes:
        out_bytes, back_bytes: bytes/s each way. overlaps: whether copies run beside compute.
        source: where the numbers come from, for people.
    """

    out_bytes: float
    back_bytes: float
    overlaps: bool
    source: str


def with_copies(priced: PricedTrace, link: Link) -> PricedTrace:
    """Returns the priced trace with the time its copies add, and with storages alive until they are copied."""
    trace = priced.trace
    if not trace.copies:
        return priced
    if not link.overlaps:
        seconds = sum(c.nbytes / link.out_bytes for c in trace.copies if c.kind == "out")
        seconds += sum(c.nbytes / link.back_bytes for c in trace.copies if c.kind == "back")
        return dataclasses.replace(priced, copy_seconds=seconds)
    starts, held, excess = _walk(priced, link)
    storages = list(trace.storages)
    for index, until in held:
        op = bisect.bisect_left(starts, until) - 1  # the last op that begins before its copy is done
        found = storages[index]
        storages[index] = dataclasses.replace(found, free_op=max(found.free_op, op))
    copied = dataclasses.replace(trace, storages=tuple(storages))
    return dataclasses.replace(priced, trace=copied, copy_seconds=excess)


def _walk(priced: PricedTrace, link: Link) -> tuple[list[float], list[tuple[int, float]], float]:
    """Returns when each op begins, until when each storage that is moved out is held, and the seconds waited."""
    copies = {op: list(group) for op, group in itertools.groupby(priced.trace.copies, key=lambda c: c.op)}
    now = out_free = back_free = excess = 0.0
    there: dict[int, float] = {}
    back: dict[int, float] = {}
    held: list[tuple[int, float]] = []
    starts: list[float] = []
    for position, seconds in enumerate(priced.op_seconds):
        for copy in copies.get(position, ()):
            if copy.kind == "out":
                out_free = max(out_free, now) + copy.nbytes / link.out_bytes
                there[copy.block] = out_free
                if copy.storage >= 0:
                    held.append((copy.storage, out_free))
            elif copy.kind == "back":
                back_free = max(back_free, now, there.get(copy.block, 0.0)) + copy.nbytes / link.back_bytes
                back[copy.block] = back_free
            else:
                waited = max(back.get(copy.block, 0.0) - now, 0.0)
                excess += waited
                now += waited
        starts.append(now)
        now += seconds
    return starts, held, excess
