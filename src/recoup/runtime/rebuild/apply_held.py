"""A plan by tensor in place: the model's forward runs under a `HeldRecorder` that knows which call ops belong to."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.errors import PlanMismatch
from recoup.ir.held import HeldPlan, OpAddress
from recoup.runtime.patch import PatchedForward, patch, unpatch
from recoup.runtime.rebuild.lineage import current_recorder
from recoup.runtime.rebuild.saved_tensor import unpack
from recoup.runtime.rebuild.segments import HeldRecorder, Mark


class HeldState:
    """What the patched forwards of one model share."""

    def __init__(self, plan: HeldPlan) -> None:
        self.plan = plan
        self.marks = marks_of(plan)
        self.suspended = False
        self.warned = False

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldState:
        copied = memo[id(self)] = HeldState(self.plan)
        return copied

    def __reduce__(self) -> Any:
        return HeldState, (self.plan,)


@dataclasses.dataclass(frozen=True)
class HeldSettings:
    """What one patched forward does: the root begins the recorder, all tell it whose ops come next."""

    path: str
    state: HeldState


def marks_of(plan: HeldPlan) -> dict[tuple[str, int], dict[int, Mark]]:
    """Returns what to do at which op: for each (path, call) by ordinal."""
    marks: dict[tuple[str, int], dict[int, Mark]] = {}

    def mark(address: OpAddress) -> Mark:
        return marks.setdefault((address.path, address.call), {}).setdefault(address.ordinal, Mark(address.op))

    for address in plan.held:
        mark(address).holds = True
    for boundary in plan.boundaries:
        found = mark(boundary.address)
        found.begins_segment, found.saves = True, boundary.saves
    return marks


def apply_held(model: nn.Module, plan: HeldPlan) -> list[PatchedForward]:
    """Patches the forwards of all modules; returns the patches, to be undone by `unpatch`.

    Raises:
        PlanMismatch: if the plan names a module that is not there; nothing was changed then.
    """
    modules = dict(model.named_modules())
    missing = sorted({a.path for a in (*plan.held, *(b.address for b in plan.boundaries))} - modules.keys())
    if missing:
        raise PlanMismatch(f"The plan holds tensors of `{missing[0]}`, which {type(model).__name__} does not have.")
    state = HeldState(plan)
    patches: list[PatchedForward] = []
    try:
        for path, module in modules.items():
            patches.append(patch(module, _run, HeldSettings(path=path, state=state)))
    except BaseException:
        for patched in reversed(patches):
            unpatch(patched)
        raise
    return patches


def _run(patched: PatchedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    settings: HeldSettings = patched.settings
    if settings.state.suspended or _torch.inside_transform() or torch.compiler.is_compiling():
        return patched.original(*args, **kwargs)
    recorder = current_recorder()
    if isinstance(recorder, HeldRecorder):
        recorder.enter(settings.path)
        try:
            return patched.original(*args, **kwargs)
        finally:
            recorder.leave()
    if settings.path or recorder is not None:
        return patched.original(*args, **kwargs)
    recorder = HeldRecorder(settings.state.marks)
    recorder.enter("")
    with recorder, torch.autograd.graph.saved_tensors_hooks(_pack, unpack):
        try:
            return patched.original(*args, **kwargs)
        finally:
            if recorder.lost and not settings.state.warned:
                settings.state.warned = True
                warnings.warn(
                    f"{type(patched.module).__name__} takes a step that its plan was not made for "
                    f"({recorder.lost[0]}): more is held than planned. Gradients are right.",
                    stacklevel=2,
                )


def _pack(tensor: torch.Tensor) -> Any:
    from recoup.runtime.rebuild.saved_tensor import pack

    return pack(tensor)
