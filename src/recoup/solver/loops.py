"""Loops over time in a captured step: one module called many times, each call reading what the one before made.

A chunk of k calls is one region: of n calls it keeps n / k states, and one chunk's taped calls while it is replayed.
Every call runs twice whatever k is, so the best k is the one with the smallest peak, near sqrt(n * state / tape) (Chen
et al. 2016, arXiv 1604.06174, there for layers of equal size). A smaller budget is met by chunking more of the calls.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from recoup.ir.decision import Ambient, Decision, Loop
from recoup.ir.trace import Trace

FEWEST_CALLS = 16  # of one module by one parent: fewer are layers that share weights
MANY_CALLS = 64  # from here on a search call by call took minutes and found less


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLoop:
    """A loop over time.

    Attributes:
        path: of the module it calls once a step.
        num_calls: steps.
        state_bytes: that go from a call to the next.
        tape_bytes: that autograd keeps of a call.
        share: of all bytes that autograd keeps of the forward.
    """

    path: str
    num_calls: int
    state_bytes: int
    tape_bytes: int
    share: float

    @property
    def dominates_step(self) -> bool:
        """Whether the loop is so long, and so much of the step, that other plans are not worth the search."""
        return self.num_calls >= MANY_CALLS and self.share >= 0.5

    def chunk(self, num_calls: int) -> int:
        """Returns the number of calls in one region if the first `num_calls` are chunked."""
        best = math.sqrt(num_calls * max(self.state_bytes, 1) / max(self.tape_bytes, 1))
        return min(max(round(best), 1), num_calls)

    def decision(
        self, num_calls: int, *, chunk: int | None = None, inside: Ambient = "save", buffers: tuple[str, ...] = ()
    ) -> Decision:
        """Returns the decision that chunks the first `num_calls` calls."""
        return Loop(
            path=self.path,
            chunk=chunk or self.chunk(num_calls),
            calls=None if num_calls >= self.num_calls else num_calls,
            inside=inside,
            buffers=buffers,
        )


def find_loop(trace: Trace) -> StepLoop | None:
    """Returns the loop over time whose calls keep the most, None if the step has none."""
    saved = {i: s for i, s in enumerate(trace.storages) if s.category == "saved"}
    total = sum(s.nbytes for s in saved.values())
    if not total:
        return None
    kept_at: dict[int, int] = {}
    for storage in saved.values():
        kept_at[storage.saved_op] = kept_at.get(storage.saved_op, 0) + storage.nbytes
    best: StepLoop | None = None
    for members in _repeated(trace):
        calls = [trace.calls[i] for i in members]
        kept = sum(kept_at.get(op, 0) for c in calls for op in range(c.first_op, c.last_op))
        before, call = calls[len(calls) // 2 - 1 : len(calls) // 2 + 1]
        read = {s for op in trace.ops[call.first_op : call.last_op] for s in op.inputs}
        state = sum(
            trace.storages[s].nbytes for s in read if before.first_op <= trace.storages[s].alloc_op < before.last_op
        )
        if not state or not kept or (best is not None and kept <= best.share * total):
            continue
        best = StepLoop(
            path=call.path,
            num_calls=len(calls),
            state_bytes=state,
            tape_bytes=kept // len(calls),
            share=kept / total,
        )
    return best


def _repeated(trace: Trace) -> Iterator[list[int]]:
    """Yields the calls of each path that one parent's forward calls many times; outer modules come first."""
    found: dict[tuple[str, int], list[int]] = {}
    for index, call in enumerate(trace.calls):
        if call.path and call.parent >= 0:
            found.setdefault((call.path, call.parent), []).append(index)
    paths = [path for path, _ in found]
    for (path, _), members in found.items():
        is_whole = paths.count(path) == 1 and not any(
            trace.calls[i].refusal or trace.calls[i].runs_once for i in members
        )
        if is_whole and len(members) >= FEWEST_CALLS:
            yield members
