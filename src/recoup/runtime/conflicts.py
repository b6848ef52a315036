"""Refuses models that no plan can be made for or applied to: no module, wrapped, compiled, checkpointed otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup._pytree import iterate_tensors
from recoup.errors import ConflictError, UsageError
from recoup.runtime.apply import find_patches
from recoup.runtime.patch import find_patch


def refuse_no_module(model: object) -> None:
    """Raises UsageError if `model` is no module: a name, a class, a list of modules."""
    if isinstance(model, nn.Module):
        return
    what = f"the class {model.__name__}: make one" if isinstance(model, type) else type(model).__name__
    raise UsageError(f"model must be a torch.nn.Module; got {what}.")


def refuse_conflicts(model: nn.Module) -> None:
    """Raises ConflictError if activation checkpointing is already on in `model`.

    Known owners: transformers (`activation_checkpointing_enable`, once `gradient_checkpointing_enable`),
    `checkpoint_wrapper` of torch and FairScale, and recoup itself.
    """
    if find_patches(model):
        raise ConflictError(
            f"A recoup plan is already applied to this {type(model).__name__}. Call `.remove()` on what `apply` or "
            "`fit` returned first; a copy of a planned model has its plan too: `recoup.Applied.on(model).remove()`."
        )
    for path, module in model.named_modules():
        if find_patch(module) is not None:
            raise ConflictError(
                f"`{path or type(model).__name__}` is already a region of recoup (`checkpoint_ops`, or a plan of "
                "another model it is part of). Call `.remove()` on what applied it first."
            )
        if type(module).__name__ in ("CheckpointWrapper", "ActivationWrapper", "CheckpointFunction"):
            raise ConflictError(
                f"`{path or type(model).__name__}` is already wrapped: a {type(module).__name__} of "
                f"{type(module).__module__.partition('.')[0]}. Pass the model without it: recoup decides which modules "
                "are recomputed."
            )
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ConflictError(
                f"`{path or type(model).__name__}` already has transformers' activation checkpointing on "
                "(gradient_checkpointing=True). Call model.gradient_checkpointing_disable(), or leave it out of the "
                "training arguments: recoup decides which modules are recomputed."
            )


# Why the step of a wrapped module cannot be captured, and where the wrapper has the bare one.
_WRAPPERS = {
    "DistributedDataParallel": ("its forward runs collectives too", "module"),
    "OptimizedModule": ("compiled code is not run op by op", "_orig_mod"),
    "FullyShardedDataParallel": ("a rank holds only its part of the step", ""),
    "FSDPModule": ("a rank holds only its part of the step", ""),
}


def _unwrapped(path: str, attribute: str) -> str:
    """Returns the code that is the bare model, or that puts a bare part in the place of the wrapped one at `path`."""
    if not path:
        return f"pass `model.{attribute}`"
    return f"call `model.set_submodule({path!r}, model.get_submodule({path!r}).{attribute})`"


def refuse_distributed(model: nn.Module) -> None:
    """Raises ConflictError if parameters are distributed tensors.

    Each rank would decide by its own measurements, and ranks that run different plans deadlock.
    """
    for path, parameter in model.named_parameters():
        if _torch.is_wrapper_type(type(parameter)):
            raise ConflictError(
                f"`{path}` is a {type(parameter).__name__}: each rank would measure, and might choose a plan of its "
                "own. Plan on one rank with recoup.plan, then recoup.integrations.distributed.broadcast_plan and "
                "apply, then recoup.verify(..., timed=False) on all of them. (recoup.runtime.conflicts)"
            )


def refuse_wrapped(model: nn.Module, *, compiled_in_place: bool = False) -> None:
    """Raises ConflictError if the model is wrapped by DDP or FSDP, or compiled: its plain step cannot be captured.

    A plan that was made before is applied to such a model by `recoup.integrations.distributed.apply`.

    Args:
        model: the model.
        compiled_in_place: whether a model that `nn.Module.compile` changed is accepted; its compiled call is replaced.
    """
    refuse_no_module(model)
    for path, module in model.named_modules():
        names = [base.__name__ for base in type(module).__mro__]
        kind = next((name for name in _WRAPPERS if name in names), "")
        what, attribute = _WRAPPERS.get(kind, ("", ""))
        if not kind and getattr(module, "_compiled_call_impl", None) is not None and not compiled_in_place:
            kind, what = "compiled in place", "compiled code is not run op by op; fit(..., compiled=True) plans that"
        if kind == "OptimizedModule" and compiled_in_place:
            raise ConflictError(
                f"`{path or type(model).__name__}` is OptimizedModule, what torch.compile returns: it goes on with "
                f"what it compiled before. Use compiled=True, which compiles the whole model in place, and train that "
                f"one: first {_unwrapped(path, attribute)}. (recoup.runtime.conflicts)"
            )
        if kind:
            advice = f": {_unwrapped(path, attribute)}" if attribute else ""
            raise ConflictError(
                f"`{path or type(model).__name__}` is {kind}: {what}. Plan and apply on the bare model{advice}; "
                "then wrap or compile the whole model. A plan that exists already goes on with "
                "recoup.integrations.distributed.apply(model, plan). (recoup.runtime.conflicts)"
            )


def refuse_unready(model: nn.Module, batch: Any) -> None:
    """Raises UsageError for a model whose parameters have no shape yet, for nested tensors, and under no_grad."""
    if not torch.is_grad_enabled():
        raise UsageError(
            "Gradients are off here (torch.no_grad or inference_mode): there is no backward to plan. Call it "
            "outside of that block."
        )
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, nn.UninitializedParameter):
                place = f"{path}.{name}" if path else name
                raise UsageError(
                    f"The parameter `{place}` of {type(module).__name__} has no shape before the first forward (a lazy "
                    "module). Run the model once on the batch (`model(*batch)`) before planning."
                )
    if any(t.is_nested for t in iterate_tensors(batch)):
        raise UsageError(
            "The batch holds a nested tensor, whose sizes differ from batch to batch and cannot be planned for. Pass "
            "`values()` and `offsets()`, or a padded tensor; `recoup.rederive()` needs no plan and takes them."
        )
