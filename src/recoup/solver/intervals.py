"""The intervals of a trace: its calls' own ops, in order, and what names them."""

from __future__ import annotations

import dataclasses

from recoup.ir.trace import Trace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A run of forward ops of one call: [first, last)."""

    call: int
    first: int
    last: int


def segments_of(trace: Trace) -> list[Interval]:
    """Returns the runs of forward ops that belong to one call, in order; a child's call splits its parent's run."""
    starts = {call.first_op for call in trace.calls} | {call.last_op for call in trace.calls}
    segments: list[Interval] = []
    first, current = 0, None
    position = 0
    for position, op in enumerate(trace.ops):
        if op.phase not in ("forward", "loss"):
            break
        if current is None or op.call != current or position in starts:
            if current is not None:
                segments.append(Interval(call=current, first=first, last=position))
            first, current = position, op.call
    else:
        position += 1
    if current is not None:
        segments.append(Interval(call=current, first=first, last=position))
    return segments


def paths_of(trace: Trace) -> list[tuple[str, int]]:
    """Returns the calls by path and index, which two captures of one step have in common."""
    return [(c.path, c.index) for c in trace.calls]


def forward_ops(trace: Trace) -> list[int]:
    """Returns the positions of the model's own forward ops, without those the engine adds (packing a mask)."""
    return [i for i, o in enumerate(trace.ops) if o.phase in ("forward", "loss") and not o.replayed]
