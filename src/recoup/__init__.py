"""recoup gets training memory back: a model, a batch and a number of bytes in; a changed, proven model out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> where it lives. Loaded on first use: `import recoup` does not import torch.
_HOMES = {
    "Applied": "recoup.engine.handle",
    "ConflictError": "recoup.errors",
    "Decision": "recoup.ir.plan",
    "Evidence": "recoup.ir.evidence",
    "Fit": "recoup.api",
    "Frontier": "recoup.api",
    "FrontierPoint": "recoup.ir.profile",
    "InfeasibleBudget": "recoup.errors",
    "InternalError": "recoup.errors",
    "Plan": "recoup.ir.plan",
    "PlanMismatch": "recoup.errors",
    "Prediction": "recoup.ir.plan",
    "Profile": "recoup.ir.profile",
    "RecoupError": "recoup.errors",
    "ReplayError": "recoup.errors",
    "StepError": "recoup.errors",
    "TargetError": "recoup.errors",
    "UsageError": "recoup.errors",
    "apply": "recoup.api",
    "fit": "recoup.api",
    "frontier": "recoup.api",
    "is_recomputing": "recoup.engine.activity",
    "max_batch": "recoup.api",
    "offload": "recoup.engine.offload",
    "plan": "recoup.api",
    "profile": "recoup.api",
    "rederive": "recoup.engine.rederive",
    "tiled_cross_entropy": "recoup.engine.tile",
    "verify": "recoup.api",
}
__all__ = sorted(["__version__", *_HOMES])

if TYPE_CHECKING:
    from recoup.api import Fit as Fit
    from recoup.api import Frontier as Frontier
    from recoup.api import apply as apply
    from recoup.api import fit as fit
    from recoup.api import frontier as frontier
    from recoup.api import max_batch as max_batch
    from recoup.api import plan as plan
    from recoup.api import profile as profile
    from recoup.api import verify as verify
    from recoup.engine.activity import is_recomputing as is_recomputing
    from recoup.engine.handle import Applied as Applied
    from recoup.engine.offload import offload as offload
    from recoup.engine.rederive import rederive as rederive
    from recoup.engine.tile import tiled_cross_entropy as tiled_cross_entropy
    from recoup.errors import ConflictError as ConflictError
    from recoup.errors import InfeasibleBudget as InfeasibleBudget
    from recoup.errors import InternalError as InternalError
    from recoup.errors import PlanMismatch as PlanMismatch
    from recoup.errors import RecoupError as RecoupError
    from recoup.errors import ReplayError as ReplayError
    from recoup.errors import StepError as StepError
    from recoup.errors import TargetError as TargetError
    from recoup.errors import UsageError as UsageError
    from recoup.ir.evidence import Evidence as Evidence
    from recoup.ir.plan import Decision as Decision
    from recoup.ir.plan import Plan as Plan
    from recoup.ir.plan import Prediction as Prediction
    from recoup.ir.profile import FrontierPoint as FrontierPoint
    from recoup.ir.profile import Profile as Profile


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'recoup' has no attribute {name!r}")
    # `recoup.plan` the function wins over nothing: no submodule carries a public function's name.
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
