"""`recoup.compile`, and what `recoup.fit` does with `compiled=`: input checked, then fitted."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from recoup.capture.optimizer import OptimizerLike, check_optimizer
from recoup.capture.snapshot import untouched
from recoup.capture.step import Objective
from recoup.compiled.division import Division
from recoup.compiled.fitting import CompiledFit, CompiledFitting
from recoup.compiled.in_place import CompiledModel
from recoup.compiled.recording import CompileOptions
from recoup.errors import InexactWarning, UsageError
from recoup.evidence.memory import storage_bytes
from recoup.planner.request import free_bytes_on
from recoup.runtime.conflicts import refuse_conflicts, refuse_unready, refuse_wrapped
from recoup.units import format_bytes, parse_bytes


def fit_compiled(
    model: nn.Module,
    batch: Any,
    *,
    budget: int | str,
    objective: Objective,
    optimizer: OptimizerLike | None,
    compiled: bool | Mapping[str, Any],
    timed: bool,
    apply_failed: bool,
    unused: Mapping[str, Any],
) -> CompiledFit:
    """Returns the model compiled in place within a budget, with its plan and evidence; see `recoup.fit`.

    Args:
        unused: arguments by name that mean nothing here; None: not given.
    """
    for name, value in unused.items():
        if value is not None:
            raise UsageError(
                f"{name}={value!r} has no meaning with compiled=: what is held is chosen in the compiler's graphs, "
                "where the model is. Leave it out."
            )
    options = CompileOptions.of(compiled)
    check_optimizer(optimizer)
    _refuse(model)
    refuse_unready(model, batch)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with untouched(model, batch, objective.functions):
        fitting = CompiledFitting(model, batch, objective, optimizer, options)
        try:
            done = fitting.fit(budget, free_bytes=free_bytes_on(str(device), None), timed=timed)
        finally:
            fitting.bench.restore()
    if done.evidence.ok or apply_failed:
        done.applied.put()  # what was put in place before was taken off with all else that the measurements changed
    if not done.evidence.ok:
        differs = next(iter(done.evidence.differences), "the measured peak is over the budget")
        warnings.warn(
            f"{type(model).__name__}, compiled within {format_bytes(done.plan.budget_bytes)}, does not do what "
            f"the plain compiled step does: {differs}. `print(fit)` shows all. [E300]",
            InexactWarning,
            stacklevel=3,
        )
    return done


def compile(  # as torch.compile
    model: nn.Module, *, budget: int | str, compiled: bool | Mapping[str, Any] = True
) -> CompiledModel:
    """Compiles a model in place so that a step's estimated peak is within a budget; nothing is run or measured.

    Each graph is planned when torch compiles it, from the sizes it then has; `fit(..., compiled=True)` also measures,
    corrects and proves, and divides one budget among several graphs.

    Args:
        model: the bare model, on its device.
        budget: peak bytes of the step, without an optimizer's state: an int or "8GiB".
        compiled: as for `fit`.

    Returns:
        The handle; `remove()` has the model run as before.

    Raises:
        UsageError: for input that cannot be used. ConflictError: if activation checkpointing is on.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        >>> handle = recoup.compile(model, budget="8MiB", compiled={"backend": "aot_eager"})
        >>> model(torch.randn(256, 64)).mean().backward()
        >>> handle.remove()
    """
    if isinstance(budget, str) and (budget.strip().endswith("%") or budget.strip().lower() in ("min", "auto")):
        raise UsageError(
            f"budget={budget!r} is of a step that was measured, and `compile` runs none. Give bytes, as '8GiB', or use "
            f"recoup.fit(model, batch, budget={budget!r}, compiled=True)."
        )
    budget_bytes, options = parse_bytes(budget), CompileOptions.of(compiled)
    _refuse(model)
    above = storage_bytes([*model.parameters(), *model.buffers()])
    return CompiledModel(model, Division(options, {}, budget_bytes, above=above).compile(model))


def _refuse(model: nn.Module) -> None:
    refuse_wrapped(model, compiled_in_place=True)
    refuse_conflicts(model)
