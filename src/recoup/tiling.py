"""Finding the head that can be tiled: tried on the captured step, never assumed from a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from recoup.capture.capture import StepSpec, capture
from recoup.engine import activity
from recoup.engine.handle import apply_decisions
from recoup.ir.plan import Decision
from recoup.ir.trace import Trace
from recoup.solve.heads import HeadCall, heads, tile_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledHead:
    """A head that was tiled in a captured step.

    Attributes:
        head: which call, and its bytes. decision: what was applied. trace: of the step with it.
    """

    head: HeadCall
    decision: Decision
    trace: Trace


def find_tiled_head(spec: StepSpec, plain: Trace, *, peak_bytes: int) -> TiledHead | None:
    """Returns the head whose loss ran over tiles, its logits never made, in a capture of the step with it tiled.

    Args:
        plain: the trace of the step as it is. peak_bytes: its peak.
    """
    for head in heads(plain, peak_bytes=peak_bytes):
        tokens = head.tile_tokens(tile_bytes(peak_bytes))
        decision = Decision(path=head.path, action="tile", tile_tokens=tokens)
        tiled, made = activity.tile_counters()
        with apply_decisions(spec.model, (decision,)):
            trace = capture(spec)
        tiled_now, made_now = activity.tile_counters()
        if trace.source == "fake" and tiled_now > tiled and made_now == made:
            return TiledHead(head=head, decision=decision, trace=trace)
    return None


def retile(decisions: Sequence[Decision], tile_tokens: int) -> tuple[Decision, ...]:
    """Returns the decisions with tiles of another size."""
    return tuple(dataclasses.replace(d, tile_tokens=tile_tokens) if d.action == "tile" else d for d in decisions)


def is_tiled(decisions: Sequence[Decision]) -> bool:
    """Whether something is tiled: then sums round differently than in the plain step."""
    return any(d.action == "tile" for d in decisions)
