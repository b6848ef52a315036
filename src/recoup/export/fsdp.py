"""A plan as an activation-checkpointing policy for FSDP: which modules `checkpoint_wrapper` goes around."""

from __future__ import annotations

import pprint

from recoup.export.left_out import Export, changed_again, header, left_out, regions_of
from recoup.ir.plan import Plan


def export_fsdp(plan: Plan) -> Export:
    """Returns a file with `make_policy(model)` for `apply_activation_checkpointing`, and `apply_plan(model)`.

    Spans become a region for each of their calls, since the policy wraps modules one by one; that is said.

    Raises:
        UsageError: if the plan has no regions, or tells calls of one module apart.
    """
    regions = regions_of(plan, target="an FSDP policy")
    missing = left_out(plan)
    spans = [d for d in regions if len(d.paths) > 1]
    if spans:
        missing += (f"{len(spans)} regions go over several calls; here each call is one and keeps its own inputs",)
    missing += changed_again(plan)
    paths = list(dict.fromkeys(path for d in regions for path in d.paths))
    listed = pprint.pformat(paths, width=110)
    code = f'''{header(plan, what="An FSDP activation-checkpointing policy", sentences=missing)}
import functools

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

REGIONS = {listed}
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name):
    """The module's path in the model before anything was wrapped around its parts."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "").removesuffix("." + wrapper[:-1])
    return name


def make_policy(model):
    """Returns the `check_fn` that is true for the plan's modules."""
    chosen = {{}}
    for name, module in model.named_modules():
        if plain_name(name) in REGIONS:
            chosen[plain_name(name)] = id(module)  # the innermost: FSDP's own wrapper stays outside
    missing = [name for name in REGIONS if name not in chosen]
    if missing:
        raise ValueError(f"made for another model: no module {{missing[:3]}}")
    picked = frozenset(chosen.values())
    return lambda module: id(module) in picked


def apply_plan(model):
    """Wraps them. For FSDP1 call it after wrapping with FSDP; for FSDP2 before `fully_shard`.

    Attributes that their forwards change (a counter) change again in the second run, which finds them changed.
    """
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=make_policy(model))
'''
    return Export(code=code, left_out=missing)
