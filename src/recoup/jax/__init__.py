"""JAX: a loss function, its arguments and a number of bytes in; the same function, planned, out.

    planned, plan = recoup.jax.fit(loss, params, batch, budget="8GiB")
    grads = jax.jit(jax.grad(planned))(params, batch)

Nothing of torch is imported on this path.
"""

from __future__ import annotations

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError(
        'recoup.jax plans JAX steps and needs JAX: pip install "recoup[jax]". Without it, recoup plans PyTorch models.'
    ) from error

from recoup.jax.api import JaxFrontier, JaxPoint, apply, fit, frontier, plan, profile
from recoup.jax.evidence import JaxEvidence, verify
from recoup.jax.inspection import JaxProfile, Residual, residuals
from recoup.jax.jax_plan import JaxPlan
from recoup.jax.page import format_html

__all__ = [
    "JaxEvidence",
    "JaxFrontier",
    "JaxPlan",
    "JaxPoint",
    "JaxProfile",
    "Residual",
    "apply",
    "fit",
    "format_html",
    "frontier",
    "plan",
    "profile",
    "residuals",
    "verify",
]
