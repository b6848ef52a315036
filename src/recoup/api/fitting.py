"""The public functions that make one plan and put it in place: plan, apply, verify, fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import nn

from recoup import progress
from recoup._allocation import return_freed_memory
from recoup.api.fit_result import Fit
from recoup.capture.fingerprint import refuse_other_model
from recoup.capture.optimizer import OptimizerLike
from recoup.capture.step import Loss, StepFunction, make_objective
from recoup.compiled.api import fit_compiled
from recoup.compiled.fitting import CompiledFit
from recoup.cost.model import CostModel
from recoup.errors import InexactWarning, UsageError
from recoup.evidence.verify import verify_plan
from recoup.ir.evidence import Evidence
from recoup.ir.plan import Plan
from recoup.planner.driver import is_on_meta
from recoup.planner.incumbents import Effort
from recoup.planner.request import fitting_for
from recoup.runtime.apply import Applied, apply_decisions, find_patches
from recoup.runtime.as_found import all_or_nothing
from recoup.runtime.conflicts import refuse_conflicts, refuse_distributed, refuse_no_module, refuse_wrapped
from recoup.runtime.offload.transport import Transport, check_transport
from recoup.units import check_budget, format_bytes


@all_or_nothing
def plan(
    model: nn.Module,
    batch: Any = None,
    *,
    budget: int | str,
    loss: Loss | None = None,
    step: StepFunction | None = None,
    inputs: Any = None,
    targets: Any = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    accumulate: int = 1,
    optimizer: OptimizerLike | None = None,
    device: str | torch.device | None = None,
    actions: Sequence[str] | None = None,
    host_budget: int | str | None = None,
    cost: CostModel | None = None,
    keep: Iterable[str] = (),
    effort: Effort = "normal",
) -> Plan:
    """Returns the fastest plan found whose simulated peak is within the budget; nothing of the model changes.

    Args:
        model: any module, on any device, `meta` too.
        batch: a dict becomes `model(**batch)`, a tuple or list `model(*batch)`, anything else `model(batch)`; its
            tensors may be on `meta`.
        budget: peak bytes of the whole step: an int, `"8GiB"`, `"60%"` of the unplanned step's peak (on a GPU of what
            libraries do not take, for that no plan changes), `"min"` (the smallest reachable), or `"auto"` (what is
            free).
        loss: `loss(output, batch)` returns a scalar. Left out: `output.loss`, `output["loss"]`, a scalar output, or
            the mean of all floating outputs (then the plan says so).
        step: `step(model, batch)` returns the scalar loss, in place of the model's call and `loss`: any loop's forward,
            with several losses, several calls of the model, other models. It calls no backward and no optimizer.
        inputs, targets: in place of `batch`: the step is `loss(model(inputs), targets)`, `inputs` as for `batch`.
        autocast: the dtype of the `torch.autocast` that training runs forward and loss in (torch.bfloat16).
        scaler: the `GradScaler` of training; its scale is read, nothing of it changes.
        accumulate: micro-batches of one optimizer step. From 2 on, gradients are there when forward begins.
        optimizer: an optimizer or its class; its state and its step's temporaries count.
        device: device that the plan is for: "cpu", "cuda", or a name of the device table. Left out: the model's own.
        actions: actions that the plan may use besides save. Left out: rederive and recompute, which are bit-exact, and
            tile, which rounds differently, only where no other plan fits.
        host_budget: bytes of the host's memory (of a temporary file for a CPU's plan), an int or `"64GiB"`, that the
            plan may hold there at a time: offload is then one of the default actions.
        cost: seconds and workspace of ops; left out: measured on this machine's device, a roofline for a named one.
        keep: paths of modules whose forward must run once only: no region and no tile contains them or lies inside of
            them. Their saved tensors may still be rederived.
        effort: how long to search once a plan fits, in simulated ops and not by the clock: "low" tries each solver's
            first answer alone, "high" simulates up to ten times as much as "normal".

    Raises:
        UsageError: for input that cannot be used.
        StepError: if the step fails.
        ConflictError: if activation checkpointing is on already.
        InfeasibleBudget: with the smallest reachable peak.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        >>> x, y = torch.randn(4096, 64), torch.randn(4096, 64)
        >>> made = recoup.plan(model, inputs=x, targets=y, loss=torch.nn.MSELoss(), budget="90%", device="a100-80gb")
        >>> made.predicted.peak_bytes <= made.budget_bytes
        True
    """
    check_budget(budget)
    objective, batch = make_objective(
        batch,
        loss=loss,
        step=step,
        inputs=inputs,
        targets=targets,
        autocast=autocast,
        scaler=scaler,
        accumulate=accumulate,
    )
    return fitting_for(
        model,
        batch,
        budget=budget,
        objective=objective,
        optimizer=optimizer,
        device=device,
        actions=actions,
        cost=cost,
        host_budget=host_budget,
        keep=keep,
        effort=effort,
    ).plan()


def apply(model: nn.Module, plan: Plan, *, transport: Transport | str = "auto") -> Applied:
    """Changes `model` in place to run as `plan` says; returns the handle that undoes it.

    Args:
        model: the model that the plan was made for, or one of the same structure.
        plan: from `plan`, or read by `Plan.load`.
        transport: how a plan that offloads moves tensors, see `recoup.offload`; "auto" is "cuda" on a GPU, else "disk".

    Raises:
        PlanMismatch: if the plan was made for another model; says what differs.
        ConflictError: if activation checkpointing is on already. The model is unchanged then.
        UsageError: if the transport is not known, or is a GPU's where there is none.

    Example:
        >>> model, x = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]), torch.randn(4096, 64)
        >>> made = recoup.plan(model, x, budget="90%", device="a100-80gb")
        >>> with recoup.apply(model, made):
        ...     model(x).mean().backward()
    """
    refuse_wrapped(model)
    refuse_other_model(model, plan)
    refuse_conflicts(model)
    # The model may be moved to the GPU after this.
    check_transport(torch.device("cuda" if torch.cuda.is_available() else "cpu"), transport)
    applied = apply_decisions(model, plan.decisions, transport=transport)
    applied.watch(plan)
    return applied


@all_or_nothing
def verify(
    model: nn.Module,
    plan: Plan,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    step: StepFunction | None = None,
    inputs: Any = None,
    targets: Any = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    accumulate: int = 1,
    optimizer: OptimizerLike | None = None,
    timed: bool = True,
) -> Evidence:
    """Runs plain and planned steps from the same state and compares values, memory and time; changes nothing.

    Args:
        model, batch, loss, step, inputs, targets, autocast, scaler, accumulate, optimizer: the training step, as for
            `plan`.
        plan: in place on the model already, or not (then it is for the duration).
        timed: also time plain and planned steps in turn.

    Raises:
        UsageError: for input that cannot be used, a model on `meta`.
        PlanMismatch: if the plan was made for another model. StepOutOfMemory: if there is no memory for it; says how
            much is needed.

    Example:
        >>> model, x = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]), torch.randn(4096, 64)
        >>> made = recoup.plan(model, x, budget="90%")
        >>> recoup.verify(model, made, x, timed=False).gradients_equal
        True
    """
    refuse_other_model(model, plan, may_be_sharded=True)
    objective, batch = make_objective(
        batch,
        loss=loss,
        step=step,
        inputs=inputs,
        targets=targets,
        autocast=autocast,
        scaler=scaler,
        accumulate=accumulate,
    )
    progress.advance("running plain and planned steps")
    return verify_plan(model, plan, batch, objective=objective, optimizer=optimizer, timed=timed)


@overload
def fit(
    model: nn.Module,
    batch: Any = None,
    *,
    budget: int | str,
    loss: Loss | None = None,
    step: StepFunction | None = None,
    inputs: Any = None,
    targets: Any = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    accumulate: int = 1,
    optimizer: OptimizerLike | None = None,
    device: str | torch.device | None = None,
    actions: Sequence[str] | None = None,
    host_budget: int | str | None = None,
    timed: bool = True,
    keep: Iterable[str] = (),
    effort: Effort = "normal",
    apply_failed: bool = False,
    compiled: Literal[False] = False,
) -> Fit: ...


@overload
def fit(
    model: nn.Module,
    batch: Any = None,
    *,
    budget: int | str,
    loss: Loss | None = None,
    step: StepFunction | None = None,
    inputs: Any = None,
    targets: Any = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    accumulate: int = 1,
    optimizer: OptimizerLike | None = None,
    device: str | torch.device | None = None,
    actions: Sequence[str] | None = None,
    host_budget: int | str | None = None,
    timed: bool = True,
    keep: Iterable[str] = (),
    effort: Effort = "normal",
    apply_failed: bool = False,
    compiled: Literal[True] | Mapping[str, Any],
) -> CompiledFit: ...


@all_or_nothing
def fit(
    model: nn.Module,
    batch: Any = None,
    *,
    budget: int | str,
    loss: Loss | None = None,
    step: StepFunction | None = None,
    inputs: Any = None,
    targets: Any = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
    accumulate: int = 1,
    optimizer: OptimizerLike | None = None,
    device: str | torch.device | None = None,
    actions: Sequence[str] | None = None,
    host_budget: int | str | None = None,
    timed: bool = True,
    keep: Iterable[str] = (),
    effort: Effort = "normal",
    apply_failed: bool = False,
    compiled: bool | Mapping[str, Any] = False,
) -> Fit | CompiledFit:
    """Plans, changes the model in place, and proves it: `plan`, `apply` and `verify` in one.

    If verification finds a measured peak above the budget, or a region whose forward cannot run twice, it plans again
    with that known; the plan's notes say so. Needs at most the planned peak plus one copy of the trainable parameters,
    which is in host memory for a model on a GPU. A plain step that does not fit is run with its saved tensors in host
    memory (in a temporary file for a model on the CPU).

    Args:
        model, batch, loss, step, inputs, targets, autocast, scaler, accumulate, optimizer: the training step, as for
            `plan`.
        budget: peak bytes of the whole step, measured: an int, `"8GiB"`, `"60%"` of the plain step's peak, `"min"` (the
            smallest reachable) or `"auto"` (what is free).
        device, actions, host_budget: as for `plan`; the step is run on the model's own device.
        timed: also time plain and planned steps in turn.
        keep, effort: as for `plan`.
        apply_failed: leave a plan in place whose evidence is not ok; otherwise nothing is in place then, a warning
            (E300) says what differed, and `fit.evidence` has all of it.
        compiled: compile the model in place (`nn.Module.compile`), within the budget: True, or a dict of
            `torch.compile`'s options (`backend`, "inductor" or "aot_eager"; `dynamic`, `fullgraph`, `mode`, `options`).
            What is held is chosen in the compiler's own graphs; `actions`, `host_budget` and `keep` have no meaning
            there. "60%" is of the peak of the step as torch compiles it. Returns a `CompiledFit`, which has a `Fit`'s
            three attributes.

    Raises:
        What `plan` and `verify` raise; the model is unchanged then.

    Example:
        >>> model, x = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]), torch.randn(4096, 64)
        >>> fit = recoup.fit(model, x, step=lambda model, x: model(x).square().mean(), budget="90%", timed=False)
        >>> fit.evidence.ok
        True
        >>> fit.applied.remove()
    """
    check_budget(budget)
    refuse_no_module(model)
    if is_on_meta(model):
        raise UsageError(
            f"{type(model).__name__} is on `meta`: there is nothing to run and prove. Use `plan`, or build it on the "
            "device."
        )
    objective, batch = make_objective(
        batch,
        loss=loss,
        step=step,
        inputs=inputs,
        targets=targets,
        autocast=autocast,
        scaler=scaler,
        accumulate=accumulate,
    )
    if compiled is not False:
        return fit_compiled(
            model,
            batch,
            budget=budget,
            objective=objective,
            optimizer=optimizer,
            compiled=compiled,
            timed=timed,
            apply_failed=apply_failed,
            unused={
                "device": device,
                "actions": actions,
                "host_budget": host_budget,
                "keep": tuple(keep) or None,
                "effort": None if effort == "normal" else effort,
            },
        )
    refuse_wrapped(model)
    refuse_distributed(model)
    return_freed_memory()
    fitting = fitting_for(
        model,
        batch,
        budget=budget,
        objective=objective,
        optimizer=optimizer,
        device=device,
        actions=actions,
        cost=None,
        host_budget=host_budget,
        keep=keep,
        effort=effort,
    )
    made, applied, evidence = fitting.fit(
        lambda made: verify_plan(model, made, batch, objective=objective, optimizer=optimizer, timed=timed)
    )
    if not evidence.ok:
        differs = next(iter(evidence.differences), "the step did something else than the plan says")
        if not apply_failed:
            applied.remove()
        elif find_patches(model) == []:
            applied = apply_decisions(model, made.decisions)
        state = "is in place all the same (apply_failed)" if apply_failed else "was taken off again"
        warnings.warn(
            f"No plan for {type(model).__name__} within {format_bytes(made.budget_bytes)} keeps the plain step's "
            f"results: {differs}. The plan {state}. `print(fit)` shows all. [E300]",
            InexactWarning,
            stacklevel=2,
        )
    applied.watch(made)
    return Fit(plan=made, applied=applied, evidence=evidence)
