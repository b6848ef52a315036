"""How decisions of each class change a call. A new action adds its line to `HOOKS`.

Regions are not here, since they nest and replay their calls: see `runtime/recompute/`. Neither are scans, whose
decision sets the budget of a loop that the module's own forward starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from recoup.ir.decision import Decision, Offload, Rederive, Save, TileLoss, TileModule
from recoup.runtime.ambient import run_under
from recoup.runtime.tile.apply import prepare_tiles, run_loss_call, run_module_call

Modules = Mapping[str, nn.Module]


def as_they_are(modules: Modules, decisions: Sequence[Decision]) -> Sequence[Decision]:
    """Returns the decisions unchanged: there is nothing to check before they are applied."""
    return decisions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """How decisions of one class run a call.

    Attributes:
        run: called as `run(decision, patched forward, forward, args, kwargs)`; returns the call's output. `forward` is
            the module's own forward with its other decisions.
        records: whether a decision for the model itself runs under the record of the step (those about saved tensors
            do); otherwise it replaces the model's call.
        prepare: checks a plan's decisions before anything is changed and returns them; may replace those of its class.
            Raises UsageError.
    """

    run: Callable[[Any, Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
    records: bool = False
    prepare: Callable[[Modules, Sequence[Decision]], Sequence[Decision]] = as_they_are


_AMBIENT = Hook(run=run_under, records=True)

HOOKS: Mapping[type[Decision], Hook] = {
    Save: _AMBIENT,
    Rederive: _AMBIENT,
    Offload: _AMBIENT,
    TileLoss: Hook(run=run_loss_call, prepare=prepare_tiles),
    TileModule: Hook(run=run_module_call, prepare=prepare_tiles),
}
