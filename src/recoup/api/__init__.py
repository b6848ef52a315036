"""The public functions: they check arguments and connect the stages (capture, cost, planner, runtime, evidence)."""

from __future__ import annotations

from recoup.api.curves import Frontier, explain, frontier, profile
from recoup.api.fit_result import Fit
from recoup.api.fitting import apply, fit, plan, verify
from recoup.api.limits import max_batch, max_tokens
from recoup.runtime.apply import Applied
from recoup.runtime.execution_context import is_recomputing
from recoup.runtime.rebuild.saved_tensor import rederive

__all__ = [
    "Applied",
    "Fit",
    "Frontier",
    "apply",
    "explain",
    "fit",
    "frontier",
    "is_recomputing",
    "max_batch",
    "max_tokens",
    "plan",
    "profile",
    "rederive",
    "verify",
]
