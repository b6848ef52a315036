"""Plans under DDP, FSDP1 and FSDP2: apply before or after wrapping, the same plan on every rank.

A plan replaces `forward` in place and leaves modules, parameters and their names unchanged, so the model may be wrapped
afterwards; `apply` finds the modules behind the names that wrappers add, so it may be wrapped before. All ranks need
the same plan: with different plans their values would still agree, but FSDP's collectives would be issued in different
orders, and the job would hang.
"""

from __future__ import annotations

import hashlib
import json

import torch.distributed as dist
from torch import nn

from recoup.cost.sharding import num_all_gathers
from recoup.errors import PlanMismatch
from recoup.ir.decision import Decision
from recoup.ir.plan import Plan
from recoup.runtime.apply import Applied, apply_decisions
from recoup.runtime.conflicts import refuse_conflicts

_WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "module")


def plan_hash(plan: Plan) -> str:
    """Returns a short hash of a plan's decisions and its model; predictions and notes do not count."""
    decisions = [decision.to_json() for decision in plan.decisions]
    text = json.dumps([plan.fingerprint, decisions], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_same_plan(plan: Plan, group: dist.ProcessGroup | None = None) -> None:
    """Raises PlanMismatch on every rank if the ranks do not hold the same plan; a collective call.

    Without an initialised process group there is one rank, and nothing to check.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    hashes: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hashes, plan_hash(plan), group=group)
    different = [i for i, found in enumerate(hashes) if found != hashes[0]]
    if different:
        raise PlanMismatch(
            f"The ranks hold different plans: rank 0 has {hashes[0]}, rank {different[0]} has "
            f"{hashes[different[0]]} ({len(different)} of {len(hashes)} differ from rank 0). Plan on rank 0 and call "
            "recoup.integrations.distributed.broadcast_plan(plan), or load one plan file on every rank."
        )


def broadcast_plan(plan: Plan | None, group: dist.ProcessGroup | None = None) -> Plan:
    """Returns rank 0's plan on every rank; a collective call. Other ranks may pass None.

    Args:
        plan: rank 0's plan; ignored on other ranks.
        group: the ranks that take part; None: all.

    Raises:
        PlanMismatch: if rank 0 has no plan.
    """
    if dist.is_available() and dist.is_initialized():
        box: list[object] = [plan.to_json() if plan is not None and dist.get_rank(group) == 0 else None]
        dist.broadcast_object_list(box, group=group, group_src=0)
        if isinstance(box[0], dict):
            return Plan.from_json(json.loads(json.dumps(box[0])))
        plan = None
    if plan is None:
        raise PlanMismatch("broadcast_plan: rank 0 has no plan to give; plan there first.")
    return plan


def apply(model: nn.Module, plan: Plan, group: dist.ProcessGroup | None = None) -> Applied:
    """Applies a plan to a wrapped or unwrapped model in place, after checking that all ranks have the same plan.

    Args:
        model: unwrapped, or wrapped by DDP, FSDP1, `fully_shard` or `torch.compile`.
        plan: a plan for the unwrapped model.
        group: the ranks that train together; None: all.

    Raises:
        PlanMismatch: if the ranks' plans differ, or a module that the plan names is missing or of another class.
        ConflictError: if activation checkpointing is on already. The model is unchanged.
    """
    check_same_plan(plan, group)
    core = unwrap(model)
    refuse_conflicts(core)
    paths = _paths_in(core)
    classes = {path: _class_name(module) for path, module in _bare_modules(core).items()}
    for path, kind in plan.structure:
        if path in classes and classes[path] != kind:
            raise PlanMismatch(f"`{path}` is a {classes[path]}, the plan was made for a {kind}. Plan for this model.")
    decisions = [_translate(decision, paths, core) for decision in plan.decisions]
    return apply_decisions(core, decisions)


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the user's model behind DDP, FSDP1 and torch.compile."""
    while True:
        name = type(model).__name__
        if name in ("DistributedDataParallel", "FullyShardedDataParallel"):
            model = model.module  # type: ignore[assignment]
        elif name == "OptimizedModule":
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def all_gathers(model: nn.Module) -> int:
    """Returns the number of all-gathers in one forward and backward of an FSDP2 model, with or without a plan.

    A region is replayed inside the backward of its unit, whose parameters are gathered at that time, so a plan adds
    none. Counted for the defaults of `fully_shard`: the root keeps its parameters after forward.
    """
    from torch.distributed.fsdp import FSDPModule

    units = [m for m in model.modules() if isinstance(m, FSDPModule)]
    return num_all_gathers(len(units))


def _class_name(module: nn.Module) -> str:
    name = type(module).__name__
    return name.removeprefix("FSDP") if type(module).__mro__[1].__name__ == "FSDPModule" else name


def _bare(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS[:2])


def _bare_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the innermost module by its path before wrapping."""
    return {_bare(path): module for path, module in model.named_modules(remove_duplicate=False)}


def _paths_in(model: nn.Module) -> dict[str, str]:
    return {_bare(path): path for path, _ in model.named_modules(remove_duplicate=False)}


def _translate(decision: Decision, paths: dict[str, str], model: nn.Module) -> Decision:
    missing = [path for path in decision.paths if path not in paths]
    if missing:
        raise PlanMismatch(
            f"The plan names `{missing[0]}`, which {type(model).__name__} does not have. Make a plan for this model."
        )
    return decision.renamed(paths)
