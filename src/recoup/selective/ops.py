"""Selective checkpointing by operator (SAC): in a region, results of some operators are kept and the rest is run again.

Torch's own mechanism (`torch.utils.checkpoint.create_selective_checkpoint_contexts`) put in place by recoup's patching.
It has two traps that are closed here: a policy that names an op packet (`aten.addmm`) never equals the overload
(`aten.addmm.default`) that is dispatched and silently keeps nothing, so names are widened to overloads; and a second
forward would count BatchNorm's statistics twice, so such modules are refused.

Cost: a dispatch mode in forward and replay, about 60 us an op on the host. `rederive` keeps less at less cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from recoup import _torch
from recoup.errors import UsageError
from recoup.runtime.conflicts import refuse_conflicts
from recoup.runtime.kv_cache import caching_paths, without_cache
from recoup.runtime.patch import Patched, PatchedForward, patch_all, unpatch
from recoup.runtime.recompute.rng_state import statistics_buffers

Policy = Callable[..., CheckpointPolicy]
aten = torch.ops.aten

_MATMULS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.linear, aten.matmul)
_ATTENTION = tuple(
    getattr(aten, name)
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(aten, name)
)
_NORMS = (aten.native_layer_norm, aten.native_group_norm, aten._fused_rms_norm, aten.rsqrt)


def overloads(ops: Iterable[Any]) -> frozenset[Any]:
    """Returns the overloads of the given ops.

    Args:
        ops: overloads (`torch.ops.aten.addmm.default`) or packets (`torch.ops.aten.addmm`: all its overloads).

    Raises:
        UsageError: for anything else, such as a function of `torch`, which no dispatched op ever equals.
    """
    found: set[Any] = set()
    for op in ops:
        if isinstance(op, torch._ops.OpOverload):
            found.add(op)
        elif isinstance(op, torch._ops.OpOverloadPacket):
            found.update(getattr(op, name) for name in op.overloads())  # type: ignore[no-untyped-call]
        else:
            name = getattr(op, "__name__", repr(op))
            raise UsageError(
                f"A policy keeps results of aten ops, and {name!r} is a {type(op).__name__}: it would match nothing. "
                "Name the op, for instance torch.ops.aten.addmm or torch.ops.aten.addmm.default."
            )
    return frozenset(found)


class KeepOps:
    """A policy: the results of these ops are kept, all others run again. Cuts a region's time, costs their bytes.

    Args:
        ops: as `overloads` takes.
        every: of them only the first of each k (counted in one region's forward).
    """

    def __init__(self, ops: Iterable[Any], *, every: int = 1) -> None:
        self.ops = overloads(ops)
        if not self.ops:
            raise UsageError("A policy that keeps no op is plain recomputation: leave op_policy out.")
        self.every = every

    def start(self) -> Policy:
        """Returns the policy for one execution of a region, its count at zero."""
        counts = {False: 0, True: 0}

        def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op not in self.ops:
                return CheckpointPolicy.PREFER_RECOMPUTE
            at = counts[bool(context.is_recompute)]
            counts[bool(context.is_recompute)] += 1
            return CheckpointPolicy.MUST_SAVE if at % self.every == 0 else CheckpointPolicy.PREFER_RECOMPUTE

        return decide

    def __reduce__(self) -> Any:
        return _keep_ops, (tuple(sorted(str(op) for op in self.ops)), self.every)


def _keep_ops(names: Sequence[str], every: int) -> KeepOps:
    def find(name: str) -> Any:
        space, op, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, space), op), overload)

    return KeepOps([find(name) for name in names], every=every)


# Name -> what it keeps.
OP_POLICIES: dict[str, KeepOps] = {
    "save-matmuls": KeepOps((*_MATMULS, *_ATTENTION)),
    "save-attention": KeepOps(_ATTENTION),
    "save-norms": KeepOps(_NORMS),
    "every-second-matmul": KeepOps((*_MATMULS, *_ATTENTION), every=2),
}


def find_policy(policy: Any) -> Any:
    """Returns the policy of that name, a list of ops as a policy, or the function itself.

    Raises:
        UsageError: if it is none of these.
    """
    if isinstance(policy, str):
        if policy not in OP_POLICIES:
            raise UsageError(f"Unknown op_policy {policy!r}. Choose from {', '.join(OP_POLICIES)}, or give a function.")
        return OP_POLICIES[policy]
    if isinstance(policy, (list, tuple, set, frozenset)):
        return KeepOps(policy)
    if not isinstance(policy, KeepOps) and not callable(policy):
        raise UsageError(f"op_policy must be a name, a list of ops or a function; got {type(policy).__name__}.")
    return policy


@dataclasses.dataclass(frozen=True, slots=True)
class _OpSettings:
    path: str
    policy: Any


def _run(patched: PatchedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled() or _torch.inside_transform():
        return patched.original(*args, **kwargs)
    settings: _OpSettings = patched.settings

    def contexts() -> Any:
        policy = settings.policy.start() if isinstance(settings.policy, KeepOps) else _Checked(settings)
        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

    return checkpoint(patched.original, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _run_without_cache(patched: PatchedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.is_grad_enabled():  # a second forward would fill a key-value cache twice; in training nobody reads it
        args, kwargs = without_cache(patched.module, args, kwargs)
    return patched.original(*args, **kwargs)


class _Checked:
    """A user's function, whose answers are looked at: torch takes anything that is not a policy for `False`."""

    def __init__(self, settings: _OpSettings) -> None:
        self._settings = settings

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        answer = self._settings.policy(context, op, *args, **kwargs)
        if isinstance(answer, bool):
            return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
        if not isinstance(answer, CheckpointPolicy):
            raise UsageError(
                f"The op_policy of `{self._settings.path}` returned {answer!r} for {op}; it must return a "
                "torch.utils.checkpoint.CheckpointPolicy, or True to keep the result."
            )
        return answer


class AppliedOps:
    """Operator-wise regions in place; `remove()` undoes them."""

    def __init__(self, patches: list[Patched]) -> None:
        self._patches = patches

    def remove(self) -> None:
        """Restores every forward that was changed; safe to call twice."""
        while self._patches:
            unpatch(self._patches.pop())


def checkpoint_ops(model: nn.Module, policy: Any, *, paths: Sequence[str]) -> AppliedOps:
    """Makes each module of `paths` a region, in place; `policy` decides which results it keeps.

    Args:
        policy: a name of `OP_POLICIES`, a list of ops (packets or overloads), or torch's own form of function.
        paths: dotted paths of modules, none inside another.

    Raises:
        UsageError: for an unknown policy or path, or a module with running statistics.
        ConflictError: if activation checkpointing is on already. The model is unchanged then.
    """
    found = find_policy(policy)
    modules = dict(model.named_modules())
    for path in paths:
        if path not in modules:
            raise UsageError(f"{type(model).__name__} has no module `{path}`. Name one of `named_modules()`.")
        if any(path.startswith(other + ".") for other in paths):
            raise UsageError(f"`{path}` lies inside another region of the same call. Name only one of them.")
        if statistics_buffers(modules[path].named_modules()):
            raise UsageError(
                f"`{path}` holds running statistics (BatchNorm), which torch's operator-wise checkpointing would "
                "update twice. Leave op_policy out: recoup's own regions update them once."
            )
    refuse_conflicts(model)
    caching = sorted(caching_paths(modules, list(paths)))
    wanted = [(modules[path], _run_without_cache, _OpSettings(path, None)) for path in caching]
    wanted += [(modules[path], _run, _OpSettings(path, found)) for path in paths]
    return AppliedOps(patch_all(wanted))
