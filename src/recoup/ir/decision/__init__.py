"""Decisions: one frozen class an action, a tagged union with JSON. No torch.

`DECISIONS` is the union; a new action adds its class there. Functions that read JSON take the classes as an argument,
so that an action may live elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recoup.errors import UsageError
from recoup.ir.decision.ambient import Rederive, Save
from recoup.ir.decision.base import Ambient, Decision
from recoup.ir.decision.loss import LossInPlace
from recoup.ir.decision.offload import Offload
from recoup.ir.decision.rebuild import Entry, OpMark, Rebuild
from recoup.ir.decision.region import Loop, Recompute, Region
from recoup.ir.decision.scan import Scan
from recoup.ir.decision.tile import Tile, TileLoss, TileModule
from recoup.ir.fields import shown

__all__ = [
    "DECISIONS",
    "Ambient",
    "Decision",
    "Entry",
    "Loop",
    "LossInPlace",
    "Offload",
    "OpMark",
    "Rebuild",
    "Recompute",
    "Rederive",
    "Region",
    "Save",
    "Scan",
    "Tile",
    "TileLoss",
    "TileModule",
    "describe_decisions",
    "follow_programs",
    "kinds",
    "read_decision",
]

# In the order in which a plan is told.
DECISIONS: tuple[type[Decision], ...] = (
    Recompute,
    Loop,
    Scan,
    Rebuild,
    LossInPlace,
    TileLoss,
    TileModule,
    Offload,
    Rederive,
    Save,
)


def read_decision(data: Any, known: Sequence[type[Decision]] = DECISIONS) -> Decision:
    """Returns the decision that `Decision.to_json` wrote.

    Raises:
        UsageError: if the action is not one of `known`, or a field does not fit.
    """
    if not isinstance(data, dict):
        raise UsageError(f"A decision is an object with `action` and `path`; got {shown(data)}.")
    kind = next((k for k in known if k.action == data.get("action")), None)
    if kind is None:
        names = ", ".join(k.action for k in known)
        raise UsageError(
            f"Decision for {shown(data.get('path', '?'))}: unknown action {shown(data.get('action'))}; known are "
            f"{names}."
        )
    return kind.from_json(data)


def follow_programs(decisions: Sequence[Decision]) -> bool:
    """Whether a step follows the program of earlier ones like it, rather than be recorded op by op."""
    return bool(decisions) and all(isinstance(d, Save | Rederive | Rebuild | LossInPlace) for d in decisions)


def describe_decisions(decisions: Sequence[Decision]) -> list[str]:
    """Returns decisions in words, one line an action."""
    if not decisions:
        return ["nothing is changed"]
    root = next((type(d) for d in decisions if d.path == "" and isinstance(d, Save | Rederive)), Save)
    is_alone = len(decisions) == 1 and not decisions[0].is_region and not isinstance(decisions[0], Scan)
    lines = []
    for kind, members in _by_class(decisions).items():
        if kind is root and not any(d.is_whole_step for d in decisions):
            lines.append(f"{kind.verb} everywhere" if is_alone else f"{kind.verb} everywhere else")
        elif members and kind is not root:
            lines += kind.describe([d for d in members if d.path] if kind in (Save, Rederive) else members)
    return lines


def kinds(decisions: Sequence[Decision]) -> list[list[Decision]]:
    """Returns the decisions that do something, by kind: regions of equal layers, all that rederive."""
    return [group for kind, members in _by_class(decisions).items() if members for group in kind.kinds(members)]


def _by_class(decisions: Sequence[Decision]) -> dict[type[Decision], list[Decision]]:
    """Returns the decisions by class, in the order of `DECISIONS`; classes that are not there come before save."""
    others = [kind for kind in dict.fromkeys(type(d) for d in decisions) if kind not in DECISIONS]
    order = [*DECISIONS[:-2], *others, *DECISIONS[-2:]]
    return {kind: [d for d in decisions if type(d) is kind] for kind in order}
