"""A plan by tensor in place: the model's forward runs under a `HeldRecorder` that knows which call ops belong to."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch

from recoup import _torch
from recoup.ir.decision import Rebuild
from recoup.runtime import execution_context
from recoup.runtime.patch import PatchedForward
from recoup.runtime.rebuild.lineage import current_recorder
from recoup.runtime.rebuild.saved_tensor import pack, unpack
from recoup.runtime.rebuild.segments import HeldRecorder, marks_of
from recoup.runtime.step_log import Counts


class HeldState:
    """State that the patched forwards of one model share.

    Attributes:
        warned: a step that went another way was told of. counts: what steps do.
    """

    offloading = None

    def __init__(self, decision: Rebuild) -> None:
        self.decision = decision
        self.marks = marks_of(decision.marks)
        self.counts = Counts()
        self.suspended = False
        self.warned = False

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldState:
        copied = memo[id(self)] = HeldState(self.decision)
        return copied

    def __reduce__(self) -> Any:
        return HeldState, (self.decision,)


@dataclasses.dataclass(frozen=True)
class HeldSettings:
    """A patched forward's part: the model's own starts the recorder, each tells it which module's ops come next."""

    path: str
    state: HeldState


def run_held(patched: PatchedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a forward under a plan by tensor."""
    settings: HeldSettings = patched.settings
    state = settings.state
    if state.suspended or _torch.inside_transform() or torch.compiler.is_compiling() or torch.compiler.is_exporting():
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
    recorder = HeldRecorder(state.marks)
    recorder.enter("")
    counting = execution_context.counting_for(state.counts)
    with counting, recorder, _torch.saved_tensors_hooks(pack, unpack):
        result = patched.original(*args, **kwargs)
    lost, num_ops = recorder.lost, state.decision.num_ops
    if num_ops is not None and recorder.num_ops != num_ops:
        lost = [*lost, f"{recorder.num_ops} ops, planned {num_ops}"]
    if lost and not state.warned:
        state.warned = True
        warnings.warn(
            f"{type(patched.module).__name__} took a step that its plan was not made for ({lost[0]}): more may be "
            "held than planned, and the peak may pass the budget. Gradients are right. Make a plan with such a step.",
            stacklevel=3,
        )
    return result
