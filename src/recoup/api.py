"""The public functions: each reads like its line in the README; this file wires the stages together."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from recoup import progress
from recoup._allocation import available_bytes, available_host_bytes, return_freed_memory
from recoup._interrupts import heard
from recoup.analysis.profile import make_profile
from recoup.capture.capture import StepSpec
from recoup.capture.fingerprint import fingerprint, structure_of
from recoup.capture.optimizer import OptimizerLike, check_optimizer
from recoup.capture.step import Loss
from recoup.cost.devices import Device, get_device
from recoup.cost.library_memory import library_bytes
from recoup.cost.measured import MeasuredCost
from recoup.cost.model import CostModel
from recoup.cost.roofline import RooflineCost
from recoup.errors import InexactWarning, InfeasibleBudget, PlanMismatch, UsageError
from recoup.evidence.verify import verify_plan
from recoup.ir.evidence import Evidence
from recoup.ir.explanation import Explanation, Trade
from recoup.ir.plan import Plan
from recoup.ir.profile import FrontierPoint, Profile
from recoup.planner.driver import Planner, is_on_meta, plan_for_budget
from recoup.planner.explain import explain as explain_plan
from recoup.planner.explain import trade
from recoup.planner.fitting import Fitting, paths_below
from recoup.planner.strategies.registry import check_actions
from recoup.planner.strategies.tile import is_tiled
from recoup.runtime.apply import Applied, apply_decisions, find_patches, plain
from recoup.runtime.conflicts import refuse_conflicts, refuse_unready, refuse_wrapped
from recoup.runtime.execution_context import is_recomputing
from recoup.runtime.offload.transport import Transport
from recoup.runtime.rebuild.saved_tensor import rederive
from recoup.units import check_budget, format_bytes, parse_bytes

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
    "plan",
    "profile",
    "rederive",
    "verify",
]

_AUTO_MARGIN = 0.92


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A planned, changed and proven model.

    Attributes:
        plan: what was decided. evidence: what was measured. applied: the handle that undoes it; if `evidence.ok` is
            False nothing is in place, unless `apply_failed=True` asked for it.
    """

    plan: Plan
    applied: Applied
    evidence: Evidence

    def __str__(self) -> str:
        from recoup.report.text import format_fit

        return format_fit(self.plan, self.evidence)


def _target(model: nn.Module, device: str | torch.device | None) -> tuple[str, Device | None, torch.device | None]:
    """Returns the device's name, its table entry (None: this machine's own), and the device to measure on."""
    own = next(model.parameters()).device if any(True for _ in model.parameters()) else torch.device("cpu")
    if device is None or (str(device) == "cuda" and own.type == "cuda"):
        device = "cpu" if own.type == "meta" else own  # of several GPUs the one that the model is on
    name = str(device)
    if name == "cpu":
        return "cpu", None, torch.device("cpu")
    if name.split(":")[0] == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                "device='cuda' measures on the GPU of this machine, and there is none. Name the one to plan for, "
                "for instance device='a100-80gb'."
            )
        return name, None, torch.device(name)
    entry = get_device(name)
    return entry.name, entry, None


def _planner(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None,
    optimizer: OptimizerLike | None,
    device: str | torch.device | None,
    actions: Sequence[str] | None,
    cost: CostModel | None,
    keep: frozenset[str] = frozenset(),
) -> tuple[Planner, str, Device | None]:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    if loss is not None and not callable(loss):
        raise UsageError(f"loss must be a function of (output, batch); got {type(loss).__name__}.")
    check_optimizer(optimizer)
    chosen = check_actions(actions)
    name, entry, here = _target(model, device)
    refuse_wrapped(model)
    refuse_conflicts(model)
    refuse_unready(model, batch)
    on_cuda = (entry.dialect if entry is not None else name.split(":")[0]) == "cuda"
    spec = StepSpec(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        dialect="cuda" if on_cuda else "cpu",
        capability=entry.capability if entry is not None else None,
        round_bytes=entry.round_bytes if entry is not None else (512 if on_cuda else 1),
        keep=keep,
    )
    if cost is None:
        cost = RooflineCost(entry) if entry is not None else MeasuredCost(here or torch.device("cpu"))
    if entry is not None:
        fixed_bytes = entry.fixed_bytes
    else:
        fixed_bytes = library_bytes(here) if on_cuda and here is not None else 0
    return Planner(spec, cost=cost, actions=chosen, fixed_bytes=fixed_bytes), name, entry


def _free_bytes(name: str, entry: Device | None) -> int:
    """Returns what `budget="auto"` stands for: what is free on the device, less a margin."""
    if entry is not None:
        return (
            entry.memory_bytes - entry.context_bytes
            if entry.dialect == "cuda"
            else int(entry.memory_bytes * _AUTO_MARGIN)
        )
    if name.startswith("cuda"):
        device = torch.device(name)
        # What torch has reserved is its own to use again; the model in it counts in the plan's peak.
        free = available_bytes(device) + torch.cuda.memory_allocated(device)
        return int(free * _AUTO_MARGIN)
    return int(available_host_bytes() * _AUTO_MARGIN)


@heard()
def plan(
    model: nn.Module,
    batch: Any,
    *,
    budget: int | str,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    device: str | torch.device | None = None,
    actions: Sequence[str] | None = None,
    cost: CostModel | None = None,
    keep: Iterable[str] = (),
) -> Plan:
    """Returns the fastest plan found whose simulated peak is within the budget; nothing of the model changes.

    Args:
        model: any module, on any device, `meta` too. batch: a dict becomes `model(**batch)`, a tuple or list
            `model(*batch)`, anything else `model(batch)`; its tensors may be on `meta`.
        budget: peak bytes of the whole step: an int, `"8GiB"`, `"60%"` of the unplanned step's peak (on a GPU of what
            libraries do not take, for that no plan changes), or `"auto"`.
        loss: `loss(output, batch)` returns a scalar. Left out: `output.loss`, `output["loss"]`, a scalar output, or
            the mean of all floating outputs (then the plan says so).
        optimizer: an optimizer or its class; its state and its step's temporaries count.
        device: where the plan will run: "cpu", "cuda", or a name of the device table. Left out: the model's own.
        actions: what the plan may use besides save. Left out: rederive and recompute, which leave every bit as it is,
            and tile, which rounds differently, only where no other plan fits.
        cost: prices of ops; left out: measured on this machine's device, a roofline for a named one.
        keep: paths of modules whose forward runs once, like the plain step's: no region and no tile contains them, or
            is inside of them. Saved tensors of theirs may still be rederived.

    Raises:
        UsageError: for input that cannot be used. StepError: if the step fails. ConflictError: if activation
            checkpointing is on already. InfeasibleBudget: with the smallest reachable peak.
    """
    check_budget(budget)
    return _fitting(
        model,
        batch,
        budget=budget,
        loss=loss,
        optimizer=optimizer,
        device=device,
        actions=actions,
        cost=cost,
        keep=keep,
    ).plan()


def _fitting(
    model: nn.Module,
    batch: Any,
    *,
    budget: int | str,
    loss: Loss | None,
    optimizer: OptimizerLike | None,
    device: str | torch.device | None,
    actions: Sequence[str] | None,
    cost: CostModel | None,
    keep: Iterable[str],
) -> Fitting:
    """Returns what plans for a budget, again without what turns out not to run twice."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    kept = paths_below(model, keep)
    first, name, entry = _planner(
        model, batch, loss=loss, optimizer=optimizer, device=device, actions=actions, cost=cost, keep=kept
    )

    def make_planner(runs_once: frozenset[str], allowed: Sequence[str] | None) -> Planner:
        if (runs_once, allowed) == (kept, actions):
            return first
        spec = dataclasses.replace(first.spec, keep=runs_once)
        return Planner(spec, cost=first.cost, actions=allowed, fixed_bytes=first.fixed_bytes)

    return Fitting(
        model=model,
        make_planner=make_planner,
        budget=budget,
        free_bytes=_free_bytes(name, entry),
        device=name,
        keep=kept,
        actions=actions,
    )


def apply(model: nn.Module, plan: Plan, *, transport: Transport | str = "auto") -> Applied:
    """Changes `model` in place to run as `plan` says; returns the handle that undoes it.

    Args:
        transport: how a plan that offloads moves tensors, see `recoup.offload`; "auto" is "cuda" on a GPU, else "disk".

    Raises:
        PlanMismatch: if the plan was made for another model; says what differs. ConflictError: if activation
            checkpointing is on already. The model is unchanged then.
    """
    refuse_wrapped(model)
    found = fingerprint(model)
    if found != plan.fingerprint:
        structure = structure_of(model)
        missing = [path for path, _ in plan.structure if path and path not in structure]
        changed = [
            f"`{path}` is {structure[path]}, was {kind}"
            for path, kind in plan.structure
            if path in structure and structure[path] != kind
        ]
        if missing:
            what = f"it has no `{missing[0]}`"
        elif changed:
            what = changed[0]
        elif type(model).__name__ != plan.model_class:
            what = f"it is a {type(model).__name__}, the plan is for a {plan.model_class}"
        else:
            what = "parameter shapes, dtypes or modules outside the planned ones differ"
        raise PlanMismatch(
            f"This plan was made for another model (structure {plan.fingerprint}, this one {found}): {what}. "
            "Make a plan for this model."
        )
    refuse_conflicts(model)
    applied = apply_decisions(model, plan.decisions, transport=transport)
    applied.watch(plan)
    return applied


@heard()
def verify(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    timed: bool = True,
) -> Evidence:
    """Runs plain and planned steps from the same state and compares values, memory and time; changes nothing.

    Args:
        plan: in place on the model already, or not (then it is for the duration).
        timed: also time interleaved pairs of steps.

    Raises:
        UsageError: if the model is on `meta`.
    """
    progress.advance("running plain and planned steps")
    return verify_plan(model, plan, batch, loss=loss, optimizer=optimizer, timed=timed)


@heard()
def fit(
    model: nn.Module,
    batch: Any,
    *,
    budget: int | str,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    device: str | torch.device | None = None,
    actions: Sequence[str] | None = None,
    timed: bool = True,
    keep: Iterable[str] = (),
    apply_failed: bool = False,
) -> Fit:
    """Plans, changes the model in place, and proves it: `plan`, `apply` and `verify` in one.

    What is found while proving is planned around: a measured peak above the budget (an allocator does what no
    simulation saw), a region whose forward cannot run twice. The plan's notes say so. The most memory that this needs
    is the planned peak and one copy of the trainable parameters' bytes, which is in host memory for a model on a GPU; a
    plain step that does not fit is run with its saved tensors in host memory, or in a temporary file for a CPU's.

    Args:
        timed: also time interleaved pairs of steps. keep: as for `plan`: modules whose forward is to run once.
        apply_failed: leave a plan in place whose evidence is not ok; otherwise nothing is in place then, a warning
            (E300) says what differed, and `fit.evidence` has all of it.

    Raises:
        What `plan` and `verify` raise; the model is unchanged then.
    """
    check_budget(budget)
    if is_on_meta(model):
        raise UsageError(
            f"{type(model).__name__} is on `meta`: there is nothing to run and prove. Use `plan`, or build it on the "
            "device."
        )
    return_freed_memory()
    fitting = _fitting(
        model,
        batch,
        budget=budget,
        loss=loss,
        optimizer=optimizer,
        device=device,
        actions=actions,
        cost=None,
        keep=keep,
    )
    made, applied, evidence = fitting.fit(
        lambda made: verify_plan(model, made, batch, loss=loss, optimizer=optimizer, timed=timed)
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


@heard()
def profile(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    device: str | torch.device | None = None,
    cost: CostModel | None = None,
) -> Profile:
    """Returns where the memory and time of one unplanned step go; nothing of the model changes.

    Args and errors are those of `plan`.
    """
    planner, _, _ = _planner(model, batch, loss=loss, optimizer=optimizer, device=device, actions=(), cost=cost)
    return make_profile(planner.priced)


class Frontier:
    """The curve of bytes against time: every point a plan, more bytes never slower among plans with equal bits.

    Tiles round differently: unless they were asked for in `actions`, they are in points below all others only.
    """

    def __init__(self, planner: Planner, device: str, points: tuple[FrontierPoint, ...], free_bytes: int) -> None:
        self._planner = planner
        self._device = device
        self._free_bytes = free_bytes
        self.points = points

    @property
    def planner(self) -> Planner:
        """The planner behind the curve, for reports: the captured steps and the simulator."""
        return self._planner

    def explain(self, budget: int | str) -> Explanation:
        """Returns why the plan for a budget is what it is: each kind of choice priced, and the budgets beside it.

        Raises:
            InfeasibleBudget: as `plan`.
        """
        made = self.plan(budget)
        candidate = self._planner.simulate(made.decisions)
        return explain_plan(self._planner, candidate, budget_bytes=made.budget_bytes)

    def buys(self, budget: int | str, more: int | str) -> Trade:
        """Returns what `more` bytes on top of a budget would buy: the two plans, and the seconds between them.

        Args:
            budget: the bytes there are. more: bytes on top of them, as a number or as text ("2GiB").
        """
        first = self.plan(budget)
        second = self.plan(first.budget_bytes + parse_bytes(more))
        return trade(self._planner.simulate(first.decisions), self._planner.simulate(second.decisions))

    def free(self, wanted: int | str) -> Plan:
        """Returns the cheapest plan whose peak is at least `wanted` bytes below the plain step's.

        Raises:
            InfeasibleBudget: if no plan frees as much.
        """
        return self.plan(self._planner.plain.peak_bytes - parse_bytes(wanted))

    def plan(self, budget: int | str) -> Plan:
        """Returns the plan for a budget, without capturing again."""
        check_budget(budget)
        made, _ = plan_for_budget(self._planner, budget=budget, free_bytes=self._free_bytes, device=self._device)
        return made

    def __str__(self) -> str:
        from recoup.report.text import format_frontier

        return format_frontier(self.points)


@heard()
def frontier(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    device: str | torch.device | None = None,
    actions: Sequence[str] | None = None,
    cost: CostModel | None = None,
    num_points: int = 10,
) -> Frontier:
    """Returns the whole curve from the smallest reachable peak to the plain step.

    Args and errors are those of `plan`; each of about `num_points` points is a simulated plan.
    """
    planner, name, entry = _planner(
        model, batch, loss=loss, optimizer=optimizer, device=device, actions=actions, cost=cost
    )
    fastest = planner.fit(1 << 62) or planner.plain  # not the plain step where scans may take more than they do in it
    candidates = {c.decisions: c for c in (planner.plain, planner.smallest(), fastest)}
    low, high = planner.smallest().peak_bytes, max(planner.plain.peak_bytes, fastest.peak_bytes)
    for i in range(1, num_points - 1):
        candidate = planner.fit(low + (high - low) * i // (num_points - 1))
        if candidate is not None:
            candidates[candidate.decisions] = candidate
    least = planner.smallest()  # the budgets between may have led to a smaller one
    candidates[least.decisions] = least
    if planner.prefers_equal_bits:  # tiles only where nothing else reaches
        reached = min(c.peak_bytes for c in candidates.values() if not is_tiled(c.decisions))
        candidates = {d: c for d, c in candidates.items() if not is_tiled(d) or c.peak_bytes < reached}
    points: list[FrontierPoint] = []
    best: dict[bool, float] = {}
    for candidate in sorted(candidates.values(), key=lambda c: (c.peak_bytes, c.step_seconds)):
        rounds = planner.prefers_equal_bits and is_tiled(candidate.decisions)
        if candidate.step_seconds < best.get(rounds, float("inf")):
            best[rounds] = candidate.step_seconds
            made = planner.plan(
                candidate, budget_bytes=candidate.peak_bytes, budget_text=str(candidate.peak_bytes), device=name
            )
            points.append(
                FrontierPoint(
                    peak_bytes=candidate.peak_bytes,
                    step_seconds=candidate.step_seconds,
                    extra_time_ratio=made.predicted.extra_time_ratio,
                    recomputed_flops=candidate.recomputed_flops,
                    plan=made,
                )
            )
    return Frontier(planner, name, tuple(points), _free_bytes(name, entry))


def explain(
    model: nn.Module,
    batch: Any,
    *,
    budget: int | str,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    device: str | torch.device | None = None,
    actions: Sequence[str] | None = None,
    cost: CostModel | None = None,
) -> Explanation:
    """Returns why the plan for a budget is what it is: what sets its peak, what each kind of choice is worth (the plan
    against the same plan without it, both simulated), and what a little less and a little more memory would cost.

    Args and errors are those of `plan`.
    """
    check_budget(budget)
    planner, name, entry = _planner(
        model, batch, loss=loss, optimizer=optimizer, device=device, actions=actions, cost=cost
    )
    return Frontier(planner, name, (), _free_bytes(name, entry)).explain(budget)


@heard()
def max_batch(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    *,
    budget: int | str,
    loss: Loss | None = None,
    optimizer: OptimizerLike | None = None,
    device: str | torch.device | None = None,
    actions: Sequence[str] | None = None,
    limit: int = 1 << 16,
) -> int:
    """Returns the largest size whose step fits the budget under some plan: simulated, so the next size does not.

    Args:
        make_batch: returns a batch of the given size (of examples, tokens, pixels: whatever grows).
        budget: absolute bytes or `"auto"`; a percentage has no meaning here. limit: the largest size tried.

    Raises:
        UsageError: for a percentage. InfeasibleBudget: if even size 1 does not fit.
    """
    check_budget(budget)
    if isinstance(budget, str) and budget.strip().endswith("%"):
        raise UsageError("max_batch needs a budget in bytes ('8GiB'); a percentage of what changes with the batch.")
    errors: list[InfeasibleBudget] = []

    here = device in (None, "cpu")

    def fits(size: int, *, metered: bool = not here) -> bool:
        planner, name, entry = _planner(
            model,
            make_batch(size),
            loss=loss,
            optimizer=optimizer,
            device=device,
            actions=actions,
            cost=None if metered else RooflineCost(get_device("cpu-generic")),
        )
        try:
            plan_for_budget(planner, budget=budget, free_bytes=_free_bytes(name, entry), device=name)
        except InfeasibleBudget as error:
            errors.append(error)
            return False
        return True

    progress.advance("trying size 1")
    if not fits(1):
        raise errors[-1]
    low, high = 1, 2
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        progress.advance(f"trying size {middle}")
        low, high = (middle, high) if fits(middle) else (low, middle)
    # So far without the workspace of this machine's kernels, which is slow to meter: now with it, from there down.
    step = 1
    while here and not fits(low, metered=True):
        progress.advance(f"size {low} fits but for its kernels' workspace")
        if low == 1:
            raise errors[-1]
        low, high, step = max(low - step, 1), low, step * 2
    while here and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle, metered=True) else (low, middle)
    return low


def suspended(model: nn.Module) -> Any:
    """Returns a context in which the model runs without the plan that is in place on it."""
    return plain(model)
