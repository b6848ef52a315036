"""How decisions of each class change a call, found by class. A new action adds its line to `HOOKS`.

Regions are not here: they nest, and their calls run again, which is `runtime/recompute/`; neither are scans, which set
bytes for what a module's own forward begins.
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
    """Returns the decisions: there is nothing to check before they are applied."""
    return decisions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """How decisions of one class run a call.

    Attributes:
        run: (decision, patched forward, the module's own forward with what else was decided, args, kwargs) -> output.
        records: whether a decision for the model itself runs under the record of the step, as those do that say what
            happens to saved tensors; otherwise it runs in place of the model's call.
        prepare: checks the decisions of a plan before anything is changed and returns them, those of its class maybe
            replaced by others. Raises UsageError.
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
