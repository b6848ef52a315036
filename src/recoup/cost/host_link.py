"""Cost of copies to the host and back: a link that fills up, and the time that does not hide behind compute.

Copies run one after the other, beside compute where the device has copy engines. The step waits where it needs a
storage that is not back yet, and where too many are on their way out: those keep their memory. Without copy engines (a
CPU and its disk) the step waits for each copy.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque

from recoup.cost.model import PricedTrace

# Storages whose copies to the host may be under way at a time: they are still on the device. One is copied while the
# next is computed.
MAX_BLOCKS_ON_THEIR_WAY = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way to host memory.

    Attributes:
        out_bytes, back_bytes: bytes/s each way.
        overlaps: whether copies run beside compute.
        source: where the numbers come from, for people.
    """

    out_bytes: float
    back_bytes: float
    overlaps: bool
    source: str


def with_copies(priced: PricedTrace, link: Link) -> PricedTrace:
    """Returns the priced trace with the time its copies add."""
    trace = priced.trace
    if not trace.copies:
        return priced
    if not link.overlaps:
        seconds = sum(c.nbytes / link.out_bytes for c in trace.copies if c.kind == "out")
        seconds += sum(c.nbytes / link.back_bytes for c in trace.copies if c.kind == "back")
        return dataclasses.replace(priced, copy_seconds=seconds)
    return dataclasses.replace(priced, copy_seconds=_seconds_waited(priced, link))


def _seconds_waited(priced: PricedTrace, link: Link) -> float:
    """Returns how long ops wait for copies, which the link makes one after the other.

    Before a storage leaves while `MAX_BLOCKS_ON_THEIR_WAY` others do, for the first of them; before anything comes
    back, for all that leave; before a storage is read that is not back yet, for it.
    """
    copies = {op: list(group) for op, group in itertools.groupby(priced.trace.copies, key=lambda c: c.op)}
    now = link_free = waited = 0.0
    leaving: deque[float] = deque()
    back: dict[int, float] = {}
    for position, seconds in enumerate(priced.op_seconds):
        for copy in copies.get(position, ()):
            until = now
            if copy.kind == "out":
                link_free = max(link_free, now) + copy.nbytes / link.out_bytes
                leaving.append(link_free)
                if len(leaving) > MAX_BLOCKS_ON_THEIR_WAY:
                    until = leaving.popleft()
            elif copy.kind == "back":
                until = leaving[-1] if leaving else now
                leaving.clear()
                link_free = back[copy.block] = max(link_free, until, now) + copy.nbytes / link.back_bytes
            else:
                until = back.get(copy.block, 0.0)
            waited += max(until - now, 0.0)
            now = max(until, now)
        now += seconds
    return waited
