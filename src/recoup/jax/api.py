"""The public functions for JAX steps."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from recoup.errors import UsageError
from recoup.jax._jax import has_pinned_host
from recoup.jax.compiled import compiled_bytes
from recoup.jax.cost import costs_for
from recoup.jax.flops import nbytes
from recoup.jax.inspection import JaxProfile, profile_of
from recoup.jax.jax_plan import JaxPlan
from recoup.jax.layout import Layout
from recoup.jax.planner import Candidate, Planner
from recoup.jax.rebuild import run
from recoup.jax.trace import Step, holds_arrays, on_one_device, trace
from recoup.jax.writing import check_fingerprint, infeasible, over_compiled, write_plan
from recoup.thresholds import MOST_TRIES
from recoup.units import check_budget, is_minimum, parse_budget

Loss = Callable[..., Any]
ACTIONS = ("recompute", "offload")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JaxPoint:
    """One plan on the curve: its peak, its time and what it runs twice."""

    peak_bytes: int
    step_seconds: float
    extra_time_ratio: float
    recomputed_flops: int
    plan: JaxPlan


class JaxFrontier:
    """The curve of (bytes, time) of one step.

    Attributes:
        points: from the leanest plan to the plain step, each faster than all with a smaller peak.
    """

    def __init__(self, planner: Planner, points: Sequence[JaxPoint]) -> None:
        self._planner = planner
        self.points = tuple(points)

    def plan(self, budget: int | str) -> JaxPlan:
        """Returns the plan for a budget; raises InfeasibleBudget as `recoup.jax.plan` does."""
        return _plan(self._planner, budget)

    def to_json(self) -> list[dict[str, Any]]:
        """Returns plain JSON data."""
        return [{**dataclasses.asdict(p), "plan": p.plan.to_json()} for p in self.points]

    def __str__(self) -> str:
        from recoup.jax.text import format_frontier

        return format_frontier(self.points)


def planner_for(
    step: Loss,
    args: Sequence[Any],
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    optimizer: Any = None,
    device: str | None = None,
    actions: Sequence[str] = ACTIONS[:1],
) -> Planner:
    """Returns what answers every budget of a step; the arguments are those of `plan`."""
    costs = costs_for(device)
    actions = (actions,) if isinstance(actions, str) else tuple(actions)
    unknown = sorted(set(actions) - set(ACTIONS))
    if unknown or "recompute" not in actions:
        raise UsageError(f"actions={actions!r}: a JAX step's are recompute, and offload beside it.")
    if "offload" in actions and device is None:
        raise UsageError(
            "actions has offload, and no device is named: what a copy to the host takes is its link's matter. Set "
            "device, for instance h100-sxm."
        )
    traced = trace(step, args, argnums, has_aux=has_aux)
    local = on_one_device(step, args, argnums, has_aux=has_aux, traced=traced)
    state_bytes = _state_bytes(traced, optimizer)
    return Planner(local, costs, state_bytes=state_bytes, offload="offload" in actions, whole=traced)


def _state_bytes(step: Step, optimizer: Any) -> int:
    if optimizer is None:
        return 0
    if not hasattr(optimizer, "init"):
        raise UsageError(
            f"optimizer={optimizer!r} has no `init`. Give an optax optimizer, for instance optax.adam(1e-3)."
        )
    chosen = [jax.ShapeDtypeStruct(step.avals[p].shape, step.avals[p].dtype) for p in step.differentiated]
    sharded = sum(step.shard_bytes[p] for p in step.differentiated)
    whole = sum(nbytes(step.avals[p]) for p in step.differentiated)
    state = sum(nbytes(leaf) for leaf in jax.tree.leaves(jax.eval_shape(optimizer.init, chosen)))
    return int(state * sharded / whole) if whole else state


def plan(
    step: Loss,
    *args: Any,
    budget: int | str,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    optimizer: Any = None,
    device: str | None = None,
    actions: Sequence[str] = ACTIONS[:1],
    confirm: bool = False,
) -> JaxPlan:
    """Finds the fastest way to run a step's loss and gradients inside a number of bytes; nothing is allocated.

    Args:
        step: returns a scalar loss of its arguments, or with `has_aux` a pair of it and anything else.
        *args: its arguments: arrays, or `jax.ShapeDtypeStruct`s, with shardings where they have some.
        budget: bytes, `"8GiB"`, or `"60%"` of the unplanned step's peak: arguments, loss, gradients, temporaries and
            the optimizer's state, on one device.
        argnums: which arguments gradients are asked of, as in `jax.grad`. has_aux: whether `step` returns a pair.
        optimizer: an optax optimizer, whose state counts.
        device: a name of recoup's table of devices ("h100-sxm") whose rates price the seconds; None: FLOPs alone.
        actions: "recompute", and "offload" to hold values in the host's memory (`pinned_host`) too: copied both ways,
            no copy hidden behind work. Needs a device.
        confirm: compile what is found, here, and plan again for fewer simulated bytes while that takes more than the
            budget.

    Raises:
        UsageError: for a budget, arguments or device that cannot be used. InfeasibleBudget: if no plan fits, or with
            `confirm` none that was compiled.

    Example:
        >>> made = recoup.jax.plan(loss, x, budget="100%")
        >>> made.predicted.peak_bytes <= made.budget_bytes
        True
    """
    check_budget(budget)
    planner = planner_for(
        step, args, argnums=argnums, has_aux=has_aux, optimizer=optimizer, device=device, actions=actions
    )
    return _plan(planner, budget, confirm=confirm)


def _plan(planner: Planner, budget: int | str, *, confirm: bool = False, must: bool = True) -> JaxPlan:
    """Returns the plan; `must`: raise where none that was compiled fits."""
    least = planner.peak_bytes(planner.leanest()) if is_minimum(budget) else None
    budget_bytes = parse_budget(budget, plain_peak_bytes=planner.peak_bytes(planner.plain), minimum_bytes=least)
    found = planner.best(budget_bytes)
    if found is None:
        raise infeasible(planner, budget_bytes)
    compiled = None
    if confirm:
        found, compiled = _confirmed(planner, found, budget_bytes)
        if must and planner.fixed_bytes + compiled > budget_bytes:
            raise over_compiled(planner, compiled, budget_bytes)
    return write_plan(planner, found, budget_bytes=budget_bytes, budget_text=str(budget), compiled=compiled)


def _confirmed(planner: Planner, found: Candidate, budget_bytes: int) -> tuple[Candidate, int]:
    """Returns the first candidate that fits compiled, else the one that takes least, and its temporaries in bytes.

    While one does not fit, the next is asked for with so many bytes less.
    """
    compiled: dict[Layout, tuple[Candidate, int]] = {}
    while len(compiled) < MOST_TRIES and found.layout not in compiled:
        temporaries = compiled_bytes(planner, found)
        compiled[found.layout] = found, temporaries
        over = planner.fixed_bytes + temporaries - budget_bytes
        if over <= 0:
            break
        found = planner.best(planner.peak_bytes(found) - over) or planner.leanest()
    return min(compiled.values(), key=lambda entry: entry[1])


def apply(step: Loss, plan: JaxPlan) -> Loss:
    """Returns the step, planned: same arguments, same results, same gradients.

    It is traced when it is called, as `jax.jit` would; on arguments of other shapes than it was planned for it raises
    PlanMismatch.

    Args:
        step: the loss function that the plan was made for. plan: from `plan`, or read by `JaxPlan.load`.

    Raises:
        UsageError: if `plan` is none, or offloads and the default backend has no `pinned_host` memory.

    Example:
        >>> planned = recoup.jax.apply(loss, recoup.jax.plan(loss, x, budget="100%"))
        >>> jax.grad(planned)(x).shape
        (64, 8)
    """
    if not isinstance(plan, JaxPlan):
        raise UsageError(f"plan={plan!r} is no recoup.jax.JaxPlan. Make one: recoup.jax.plan(step, *args, budget=...).")
    offloads = any(part.offloaded for segment in plan.segments for part in segment.walk())
    if offloads and not has_pinned_host():
        raise UsageError(
            f"The plan holds values in pinned_host memory, which the backend `{jax.default_backend()}` has not. Plan "
            "without offload."
        )

    @functools.wraps(step)
    def planned(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            bound = inspect.signature(step).bind(*args, **kwargs)
            if bound.kwargs:
                raise UsageError(
                    f"The planned step takes the arguments that the plan was made for, by position; "
                    f"{', '.join(bound.kwargs)} can only be given by name. Give them to the step beforehand: "
                    "functools.partial."
                )
            args = bound.args
        traced = trace(step, args, tuple(range(len(args))), has_aux=True, is_loss=False)
        check_fingerprint(traced, plan)
        return jax.tree.unflatten(traced.result, run(traced.program, plan.segments, traced.arrays_of(args)))

    return planned


def fit(
    step: Loss,
    *args: Any,
    budget: int | str,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    optimizer: Any = None,
    device: str | None = None,
    actions: Sequence[str] = ACTIONS[:1],
    confirm: bool | None = None,
) -> tuple[Loss, JaxPlan]:
    """Plans a step and applies the plan.

    Args:
        step, *args, budget, argnums, has_aux, optimizer, device, actions: as for `plan`.
        confirm: as there. None: where the arguments are arrays, for the step will run here then; a plan that fits
            simulated alone is handed back too, and its notes say what it takes compiled.

    Returns:
        The planned step, to be used as the plain one was: `jax.jit(jax.grad(planned))`; and its plan.

    Raises:
        UsageError, InfeasibleBudget: as `plan`.

    Example:
        >>> planned, made = recoup.jax.fit(loss, x, budget="100%")
        >>> jax.jit(jax.grad(planned))(x).shape
        (64, 8)
    """
    check_budget(budget)
    planner = planner_for(
        step, args, argnums=argnums, has_aux=has_aux, optimizer=optimizer, device=device, actions=actions
    )
    made = _plan(planner, budget, confirm=holds_arrays(args) if confirm is None else confirm, must=confirm is True)
    return apply(step, made), made


def frontier(
    step: Loss,
    *args: Any,
    num_points: int = 20,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    optimizer: Any = None,
    device: str | None = None,
    actions: Sequence[str] = ACTIONS[:1],
) -> JaxFrontier:
    """Returns the curve of bytes and time.

    Args:
        step, *args, argnums, has_aux, optimizer, device, actions: as for `plan`.
        num_points: at most so many plans, from the smallest reachable peak to the plain step.

    Raises:
        UsageError: as `plan`.

    Example:
        >>> len(recoup.jax.frontier(loss, x, num_points=3).points) >= 1
        True
    """
    planner = planner_for(
        step, args, argnums=argnums, has_aux=has_aux, optimizer=optimizer, device=device, actions=actions
    )
    points = [_point(planner, candidate) for candidate in planner.curve(num_points)]
    return JaxFrontier(planner, points)


def _point(planner: Planner, candidate: Candidate) -> JaxPoint:
    peak = planner.peak_bytes(candidate)
    made = write_plan(planner, candidate, budget_bytes=peak, budget_text=str(peak))
    return JaxPoint(
        peak_bytes=peak,
        step_seconds=candidate.seconds,
        extra_time_ratio=made.predicted.extra_time_ratio,
        recomputed_flops=made.predicted.recomputed_flops,
        plan=made,
    )


def profile(
    step: Loss,
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    optimizer: Any = None,
    device: str | None = None,
) -> JaxProfile:
    """Returns where the unplanned step's memory goes.

    Args:
        step, *args, argnums, has_aux, optimizer, device: as for `plan`.

    Raises:
        UsageError: as `plan`.

    Example:
        >>> recoup.jax.profile(loss, x).peak_bytes > x.nbytes
        True
    """
    return profile_of(planner_for(step, args, argnums=argnums, has_aux=has_aux, optimizer=optimizer, device=device))
