"""Finding the head that can be tiled: tried on the captured step, never assumed from a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from recoup.capture.capture import StepSpec, capture
from recoup.engine import activity
from recoup.engine.handle import apply_decisions
from recoup.errors import UsageError
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
    found = heads(plain, peak_bytes=peak_bytes)
    for head in (*found, *_with_adapters(found)):
        tokens = head.tile_tokens(tile_bytes(peak_bytes))
        decision = Decision(path=head.path, action="tile", tile_tokens=tokens)
        tiled, made = activity.tile_counters()
        try:
            applied = apply_decisions(spec.model, (decision,))
        except UsageError:
            continue  # the module around two products is no head with adapters
        with applied:
            trace = capture(spec)
        tiled_now, made_now = activity.tile_counters()
        if trace.source == "fake" and tiled_now > tiled and made_now == made:
            return TiledHead(head=head, decision=decision, trace=trace)
    return None


def _with_adapters(found: Sequence[HeadCall]) -> list[HeadCall]:
    """Returns the module around two products of the same size, as a head: a base layer and its low-rank adapter."""
    if len(found) < 2 or found[0].output_bytes != found[1].output_bytes:
        return []
    shared = []
    for a, b in zip(found[0].path.split("."), found[1].path.split("."), strict=False):
        if a != b:
            break
        shared.append(a)
    return [dataclasses.replace(found[0], path=".".join(shared))] if shared else []


def retile(decisions: Sequence[Decision], tile_tokens: int) -> tuple[Decision, ...]:
    """Returns the decisions with tiles of another size."""
    return tuple(dataclasses.replace(d, tile_tokens=tile_tokens) if d.action == "tile" else d for d in decisions)


def is_tiled(decisions: Sequence[Decision]) -> bool:
    """Whether something is tiled: then sums round differently than in the plain step."""
    return any(d.action == "tile" for d in decisions)
