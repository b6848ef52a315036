"""recoup gets training memory back: a model, a batch and a number of bytes in; a changed, proven model out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> where it lives. Loaded on first use: `import recoup` does not import torch.
_HOMES = {
    "Applied": "recoup.runtime.apply",
    "BatchTooLarge": "recoup.errors",
    "CompiledFit": "recoup.compiled.fitting",
    "CompiledPlan": "recoup.ir.compiled_plan",
    "ConflictError": "recoup.errors",
    "Decision": "recoup.ir.decision",
    "Evidence": "recoup.ir.evidence",
    "Explanation": "recoup.ir.explanation",
    "Fit": "recoup.api",
    "Frontier": "recoup.api",
    "FrontierPoint": "recoup.ir.profile",
    "InexactWarning": "recoup.errors",
    "OtherStepWarning": "recoup.errors",
    "OverBudgetWarning": "recoup.errors",
    "InfeasibleBudget": "recoup.errors",
    "InternalError": "recoup.errors",
    "Plan": "recoup.ir.plan",
    "PlanMismatch": "recoup.errors",
    "Prediction": "recoup.ir.plan",
    "Profile": "recoup.ir.profile",
    "RecoupError": "recoup.errors",
    "ReplayError": "recoup.errors",
    "StepError": "recoup.errors",
    "StepOutOfMemory": "recoup.errors",
    "TargetError": "recoup.errors",
    "Trade": "recoup.ir.explanation",
    "UsageError": "recoup.errors",
    "CheckpointConfig": "recoup.selective.config",
    "CheckpointWrapper": "recoup.selective.wrapper",
    "MemoryProfiler": "recoup.selective.profiler",
    "ProfileReport": "recoup.selective.profile_report",
    "ReversibleSequential": "recoup.selective.reversible",
    "SelectiveCheckpointer": "recoup.selective.checkpointer",
    "apply": "recoup.api",
    "contrastive": "recoup.runtime.contrastive",
    "cross_entropy": "recoup.runtime.loss_in_place",
    "compile": "recoup.compiled.api",
    "explain": "recoup.api",
    "fit": "recoup.api",
    "frontier": "recoup.api",
    "hold": "recoup.runtime.rebuild.hold",
    "is_recomputing": "recoup.runtime.execution_context",
    "max_batch": "recoup.api",
    "max_tokens": "recoup.api",
    "TokenLimits": "recoup.ir.lengths",
    "offload": "recoup.runtime.offload.saved_tensor",
    "offload_optimizer": "recoup.runtime.offload.optimizer_state",
    "plan": "recoup.api",
    "profile": "recoup.api",
    "recurrent": "recoup",
    "rederive": "recoup.runtime.rebuild.saved_tensor",
    "tiled": "recoup.runtime.tile.module.tiled",
    "tiled_cross_entropy": "recoup.runtime.tile.loss.cross_entropy",
    "tiled_entropy": "recoup.runtime.tile.loss.token_losses",
    "tiled_kl": "recoup.runtime.tile.loss.token_losses",
    "tiled_log_probs": "recoup.runtime.tile.loss.token_losses",
    "tiled_log_probs_and_entropy": "recoup.runtime.tile.loss.token_losses",
    "tiled_logsumexp": "recoup.runtime.tile.loss.token_losses",
    "tiled_soft_cross_entropy": "recoup.runtime.tile.loss.token_losses",
    "tiled_topk_distillation": "recoup.runtime.tile.loss.token_losses",
    "verify": "recoup.api",
    "watch": "recoup.integrations.watch",
}
__all__ = sorted(["__version__", *_HOMES])

if TYPE_CHECKING:
    from recoup.api import Fit as Fit
    from recoup.api import Frontier as Frontier
    from recoup.api import apply as apply
    from recoup.api import explain as explain
    from recoup.api import fit as fit
    from recoup.api import frontier as frontier
    from recoup.api import max_batch as max_batch
    from recoup.api import max_tokens as max_tokens
    from recoup.api import plan as plan
    from recoup.api import profile as profile
    from recoup.api import verify as verify
    from recoup.compiled.api import compile as compile
    from recoup.errors import BatchTooLarge as BatchTooLarge
    from recoup.errors import ConflictError as ConflictError
    from recoup.errors import InexactWarning as InexactWarning
    from recoup.errors import InfeasibleBudget as InfeasibleBudget
    from recoup.errors import InternalError as InternalError
    from recoup.errors import OtherStepWarning as OtherStepWarning
    from recoup.errors import OverBudgetWarning as OverBudgetWarning
    from recoup.errors import PlanMismatch as PlanMismatch
    from recoup.errors import RecoupError as RecoupError
    from recoup.errors import ReplayError as ReplayError
    from recoup.errors import StepError as StepError
    from recoup.errors import StepOutOfMemory as StepOutOfMemory
    from recoup.errors import TargetError as TargetError
    from recoup.errors import UsageError as UsageError
    from recoup.integrations.watch import watch as watch
    from recoup.ir.decision import Decision as Decision
    from recoup.ir.evidence import Evidence as Evidence
    from recoup.ir.explanation import Explanation as Explanation
    from recoup.ir.explanation import Trade as Trade
    from recoup.ir.lengths import TokenLimits as TokenLimits
    from recoup.ir.plan import Plan as Plan
    from recoup.ir.plan import Prediction as Prediction
    from recoup.ir.profile import FrontierPoint as FrontierPoint
    from recoup.ir.profile import Profile as Profile
    from recoup.runtime.apply import Applied as Applied
    from recoup.runtime.contrastive import contrastive as contrastive
    from recoup.runtime.execution_context import is_recomputing as is_recomputing
    from recoup.runtime.loss_in_place import cross_entropy as cross_entropy
    from recoup.runtime.offload.optimizer_state import offload_optimizer as offload_optimizer
    from recoup.runtime.offload.saved_tensor import offload as offload
    from recoup.runtime.rebuild.hold import hold as hold
    from recoup.runtime.rebuild.saved_tensor import rederive as rederive
    from recoup.runtime.tile.loss.cross_entropy import tiled_cross_entropy as tiled_cross_entropy
    from recoup.runtime.tile.loss.token_losses import tiled_entropy as tiled_entropy
    from recoup.runtime.tile.loss.token_losses import tiled_kl as tiled_kl
    from recoup.runtime.tile.loss.token_losses import tiled_log_probs as tiled_log_probs
    from recoup.runtime.tile.loss.token_losses import tiled_log_probs_and_entropy as tiled_log_probs_and_entropy
    from recoup.runtime.tile.loss.token_losses import tiled_logsumexp as tiled_logsumexp
    from recoup.runtime.tile.loss.token_losses import tiled_soft_cross_entropy as tiled_soft_cross_entropy
    from recoup.runtime.tile.loss.token_losses import tiled_topk_distillation as tiled_topk_distillation
    from recoup.runtime.tile.module.tiled import tiled as tiled
    from recoup.selective.checkpointer import SelectiveCheckpointer as SelectiveCheckpointer
    from recoup.selective.config import CheckpointConfig as CheckpointConfig
    from recoup.selective.profile_report import ProfileReport as ProfileReport
    from recoup.selective.profiler import MemoryProfiler as MemoryProfiler
    from recoup.selective.reversible import ReversibleSequential as ReversibleSequential
    from recoup.selective.wrapper import CheckpointWrapper as CheckpointWrapper


def __getattr__(name: str) -> Any:
    if name == "jax":  # a subpackage that needs its extra: not in `__all__`
        return importlib.import_module("recoup.jax")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'recoup' has no attribute {name!r}")
    if name == "recurrent":  # a subpackage, not a name in one; light until one of its own names is used
        return importlib.import_module("recoup.recurrent")
    # `recoup.plan` the function wins over nothing: no submodule carries a public function's name.
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
