"""A plan by tensor in place: the model's forward runs under a `HeldRecorder` that knows which call ops belong to."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from recoup import _torch
from recoup._pytree import iterate_tensors
from recoup.ir.decision import Entry, LossInPlace, Rebuild
from recoup.runtime import execution_context
from recoup.runtime.compiling import tell_compiled
from recoup.runtime.loss_in_place import LossInPlaceMode, losses_in_place
from recoup.runtime.patch import Patched, PatchedForward, PatchedMethod
from recoup.runtime.rebuild.calls import CallWatch
from recoup.runtime.rebuild.held_recorder import HeldRecorder
from recoup.runtime.rebuild.known_calls import Calls
from recoup.runtime.rebuild.lineage import current, current_recorder
from recoup.runtime.rebuild.marks import marks_of
from recoup.runtime.rebuild.saved_tensor import pack, unpack
from recoup.runtime.rebuild.step_program import like_step
from recoup.runtime.step_log import Counts


class HeldState:
    """State that the patched forwards of one model share.

    Attributes:
        entries: those of the decision, by key. marks: of each.
        loss: how the model's own cross entropies run; None: as they are.
        warned: whether the warning about a step with other ops than planned was given.
        num_held: of the tensors that a step saves, how many are held when its forward ends (the graphs of others are
            gone): as in a step that saved as many as planned; until one did, all of them.
        counts: counters of the steps (`execution_context`).
    """

    offloading = None

    def __init__(self, decision: Rebuild, loss: LossInPlace | None = None) -> None:
        self.decision = decision
        self.loss = loss
        self.entries = {entry.key: entry for entry in decision.entries}
        self.marks = {key: marks_of(m for m in decision.marks if m.entry == key) for key in self.entries}
        self.calls = Calls()
        self.counts = Counts()
        self.suspended = False
        self.warned = False
        self.num_held = decision.num_saved
        self._units: dict[type[nn.Module], bool] = {}

    @property
    def counts_calls(self) -> bool:
        """Whether a step runs whose calls and ops are numbered."""
        return not is_dynamo_compiling() and isinstance(current.recorder, HeldRecorder)

    def is_unit(self, kind: type[nn.Module]) -> bool:
        """Whether modules of a class are sharded by themselves (`fully_shard` changes a module's class)."""
        found = self._units.get(kind)
        if found is None:
            found = self._units[kind] = _torch.is_fsdp_unit_type(kind)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldState:
        copied = memo[id(self)] = HeldState(self.decision, self.loss)
        return copied

    def __reduce__(self) -> Any:
        return HeldState, (self.decision, self.loss)


@dataclasses.dataclass(frozen=True)
class HeldSettings:
    """Settings of one patched forward: that of an entry starts the recorder, each enters its module in it.

    Attributes:
        entry: key of a method that is an entry; "" for forwards.
    """

    path: str
    state: HeldState
    entry: str = ""


def run_held(patched: PatchedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a forward under a plan by tensor."""
    settings: HeldSettings = patched.settings
    recorder = None if is_dynamo_compiling() else current.recorder
    if recorder is not None and (watch := recorder.watch) is not None and not recorder.paused:
        is_told = settings.path not in recorder.untold
        if not is_told or watch.passes(settings.path):
            inside = recorder.inside
            inside.append(settings)
            try:
                module = patched._module()  # `original`, without its call
                if type(module) is patched.kind:
                    return patched.kind.forward(module, *args, **kwargs)  # type: ignore[union-attr]
                return patched.original(*args, **kwargs)
            finally:
                if recorder.watch is None or (is_told and not watch.passes(None)):  # the program has ended
                    _leave(recorder, settings.state.is_unit(type(patched.module)))
                inside.pop()
    if recorder is not None:
        recorder = current_recorder()
    state = settings.state
    if torch.compiler.is_compiling():
        if settings.path in state.entries and torch.is_grad_enabled():
            tell_compiled(state.decision.action, type(patched.module).__name__, settings.path)
        return patched.original(*args, **kwargs)
    if isinstance(recorder, HeldRecorder):
        kind = type(patched.module)
        is_unit = state.is_unit(kind)
        if is_unit:
            recorder.begin_segment()  # FSDP2 has its parameters there in its own forward and backward only
        recorder.enter(settings.path)
        try:
            result = patched.original(*args, **kwargs)
            recorder.frame.settle()
            return result
        finally:
            _leave(recorder, is_unit)
    if state.suspended or _torch.inside_transform() or torch.compiler.is_exporting():
        return patched.original(*args, **kwargs)
    if settings.path not in state.entries or recorder is not None:
        return patched.original(*args, **kwargs)
    return _enter(patched, state.entries[settings.path], args, kwargs)


def run_method(patched: PatchedMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a method under a plan by tensor, one of its entries; where it is called inside of another, as it is."""
    settings: HeldSettings = patched.settings
    if is_dynamo_compiling() or torch.compiler.is_exporting() or _torch.inside_transform():
        return patched.original(*args, **kwargs)
    if settings.state.suspended or current.recorder is not None:
        return patched.original(*args, **kwargs)
    return _enter(patched, settings.state.entries[settings.entry], args, kwargs)


def _enter(patched: Patched, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an entry under a recorder of its own."""
    state: HeldState = patched.settings.state
    with execution_context.counting_for(state.counts):
        marks = state.marks[entry.key] if torch.is_grad_enabled() else {}  # an evaluation saves nothing
        recorder = HeldRecorder(marks, _share(entry, args, kwargs))
        recorder.enter(entry.path)
        is_followed = False
        if _torch.num_function_modes() or state.calls.is_compiled:
            with losses_in_place(state.loss), recorder, _torch.saved_tensors_hooks(pack, unpack):
                result = patched.original(*args, **kwargs)
        else:
            loss = None if state.loss is None else LossInPlaceMode(state.loss)
            watch = CallWatch(recorder, state.calls, like_step(patched.module, args, kwargs, entry.key), loss)
            with watch, recorder, _torch.on_compiled_calls(watch.leave), watch.hooks:
                result = patched.original(*args, **kwargs)
            watch.learn()
            is_followed = watch.is_done
    if not is_followed:
        recorder.frame.settle()
    lost = recorder.lost
    more = _num_more(state, recorder)
    if more:
        lost = [*lost, f"autograd saves {more + (state.num_held or 0)} tensors, planned {state.num_held}"]
    recorder.packed.clear()
    if lost and not state.warned:
        state.warned = True
        warnings.warn(
            f"{type(patched.module).__name__} took a step that its plan was not made for ({lost[0]}): more may be "
            "held than planned, and the peak may pass the budget. Gradients are right. Make a plan with such a step.",
            stacklevel=4,
        )
    return result


def _num_more(state: HeldState, recorder: HeldRecorder) -> int:
    """Returns how many more tensors than planned a forward that has ended saved and holds; 0 if it does not.

    Fewer are no danger: a capture takes sparse tensors apart and saves the parts.
    """
    planned, held = state.decision.num_saved, state.num_held
    if planned is None or held is None:
        return 0
    num_saved = recorder.num_followed + len(recorder.packed)
    if num_saved <= planned:
        if num_saved == planned and not recorder.num_followed:
            state.num_held = recorder.num_saved()
        return 0
    if recorder.num_followed:  # what a program has saved includes what is gone by now, as what it would have does
        return max(recorder.num_followed + recorder.num_saved() - max(planned, recorder.num_in_program), 0)
    return max(recorder.num_saved() - held, 0)


def _share(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Returns how many of the planned inputs' elements a call has, as a share of at most 1."""
    if not entry.input_numel:
        return 1.0
    tensors = iterate_tensors((args, kwargs))
    numel = sum([tensor.numel() for tensor in tensors if tensor.layout is torch.strided])
    return min(1.0, numel / entry.input_numel)


def _leave(recorder: Any, is_unit: bool) -> None:
    recorder.leave()
    if is_unit:
        recorder.begin_segment()
