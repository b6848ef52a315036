"""The strategies there are, in the order they are asked. A new action adds its line here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from recoup.errors import UsageError
from recoup.planner.strategies.base import Strategy
from recoup.planner.strategies.by_hand import ByHandStrategy
from recoup.planner.strategies.loop import LoopStrategy
from recoup.planner.strategies.loss import LossStrategy
from recoup.planner.strategies.offload import OffloadStrategy
from recoup.planner.strategies.rebuild import RebuildStrategy
from recoup.planner.strategies.recompute import RecomputeStrategy
from recoup.planner.strategies.scan import ScanStrategy
from recoup.planner.strategies.tile_search import TileStrategy

# Rebuild comes first: its plan is mostly the best, and what others reckon to be slower is not simulated. By hand comes
# late, to beat what the others found; scans last, to move the bytes of the best of all (the loss proposes nothing).
STRATEGIES: tuple[type[Strategy], ...] = (
    RebuildStrategy,
    RecomputeStrategy,
    LoopStrategy,
    OffloadStrategy,
    TileStrategy,
    ByHandStrategy,
    ScanStrategy,
    LossStrategy,
)
# What a plan may use if nothing is said; the other actions are asked for by name.
DEFAULT_ACTIONS = ("rederive", "recompute", "loss-in-place", "tile")
OPT_IN_ACTIONS = tuple(dict.fromkeys(a for s in STRATEGIES for a in s.actions if a not in DEFAULT_ACTIONS))


def check_actions(actions: Any) -> tuple[str, ...] | None:
    """Returns the actions as a tuple, None where none were asked for.

    Raises:
        UsageError: if one is not known.
    """
    if actions is None:
        return None
    known = (*DEFAULT_ACTIONS, *OPT_IN_ACTIONS)
    if not isinstance(actions, Iterable):
        raise UsageError(f"actions must be names of {', '.join(known)}; got {actions!r}.")
    chosen = (actions,) if isinstance(actions, str) else tuple(actions)
    for action in chosen:
        if action not in known:
            raise UsageError(f"Unknown action {action!r}. Choose from {', '.join(known)} (save is always there).")
    return chosen
