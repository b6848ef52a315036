"""Runs a call of a planned module: the patched forward looks up the decisions for this call and carries them out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from recoup import _torch
from recoup._pytree import iterate_tensors
from recoup.ir.decision import (
    Decision,
    Loop,
    Offload,
    Recompute,
    Rederive,
    Region,
    Save,
    Scan,
)
from recoup.runtime import execution_context, scan_bytes
from recoup.runtime.compiling import tell_compiled
from recoup.runtime.hooks import Hook
from recoup.runtime.kv_cache import without_cache
from recoup.runtime.loss_in_place import losses_in_place
from recoup.runtime.patch import PatchedForward
from recoup.runtime.rebuild import saved_tensor
from recoup.runtime.rebuild.lineage import current_recorder
from recoup.runtime.rebuild.rederive_program import rederives_in
from recoup.runtime.rebuild.rederive_steps import rederived_step
from recoup.runtime.rebuild.step_program import like_step
from recoup.runtime.rebuild.watched_recorder import WatchedRecorder
from recoup.runtime.recompute import region as regions
from recoup.runtime.recompute.object_state import Places
from recoup.runtime.recompute.region_step import Member
from recoup.runtime.recompute.scope import inside_region
from recoup.runtime.step_state import StepState

_nothing = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Settings:
    """The decisions about one module, fixed when the plan is applied.

    Attributes:
        decisions: decisions of its path; one with a call number holds for that call only. Several regions of one call
            nest, the outermost first.
        joins: spans that its calls continue, the outermost first.
        derives_below: whether a decision below it rederives.
        records: whether it is the model itself and lineage is recorded for rederive decisions below: the ops that lead
            to a saved tensor may lie in other calls.
        hooks: hook of each decision class.
        drops_cache: whether its call would fill a key-value cache (`use_cache`), which a replay below would fill again.
    """

    path: str
    decisions: tuple[Decision, ...]
    joins: tuple[Recompute, ...]
    derives_below: bool
    buffers: tuple[str, ...]
    state: StepState
    is_root: bool
    hooks: Mapping[type[Decision], Hook]
    drops_cache: bool = False
    records: bool = False

    def decide(self, call: int) -> Decision | None:
        """Returns the decision for the given call that is not a region; None if there is none."""
        return next((d for d in self.decisions if d.holds(call) and not isinstance(d, Region | Scan)), None)

    def decided_calls(self) -> frozenset[int] | None:
        """Returns the numbers of the calls that it says something about; None if it may be any call."""
        calls = frozenset(d.call for d in self.decisions if d.call is not None)
        says_of_single_calls = all(d.call is not None for d in self.decisions)
        is_told = self.is_root or self.joins or self.state.rederived_calls is not None
        return calls if self.state.counts_calls and says_of_single_calls and not is_told else None

    def regions(self, call: int, args: Any) -> list[Region]:
        """Returns the regions that the given call begins or continues, the outermost first.

        A decision's call number is that of the first call of its span; the arguments of a later call tell whether it
        belongs to the span.
        """
        inside = [d for d in self.joins if regions.continues(d, d.span, self.path, args)]
        return inside + [
            d
            for d in self.decisions
            if isinstance(d, Region) and d.holds(call) and not any(d is other for other in inside)
        ]

    def forward(self, patched: PatchedForward, call: int) -> Callable[..., Any]:
        """Returns the module's own forward for the given call, with its scans limited to their decided bytes."""
        found = {d.index: d.budget_bytes for d in self.decisions if isinstance(d, Scan) and d.holds(call)}
        return functools.partial(_run_scans, patched.original, found) if found else patched.original


def _run_scans(forward: Callable[..., Any], bytes_of: dict[int, int], /, *args: Any, **kwargs: Any) -> Any:
    with scan_bytes.ScansIn(bytes_of):
        return forward(*args, **kwargs)


def run_call(patched: PatchedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a call of a patched module as decided for it; plainly if no backward will follow."""
    if not patched.settings.is_root or torch.compiler.is_compiling():
        return _run(patched, args, kwargs)
    state = patched.settings.state
    with state.inside_model():
        output = _run(patched, args, kwargs)
    return state.will_end(output)


def _run(patched: PatchedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    settings: Settings = patched.settings
    state = settings.state
    if state.suspended or not torch.is_grad_enabled() or _torch.inside_transform():
        if state.counts_calls and not state.suspended and patched.module.training:  # an evaluation is part of no step
            state.count(settings.path)
        return patched.original(*args, **kwargs)
    if torch.compiler.is_exporting():
        return patched.original(*args, **kwargs)
    if settings.drops_cache:
        args, kwargs = without_cache(patched.module, args, kwargs)
    if torch.compiler.is_compiling():
        return _run_compiled(patched, args, kwargs)
    if settings.is_root and state.loss is not None and state.rederived_calls is None:
        with losses_in_place(state.loss):
            return _run_eager(patched, args, kwargs)
    return _run_eager(patched, args, kwargs)


def _run_eager(patched: PatchedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    settings: Settings = patched.settings
    state = settings.state
    prepared: _Prepared | None = patched.prepared
    decided = prepared.decided if prepared is not None and prepared.settings is settings else None
    if decided is not None and state.next_call(settings.path) not in decided:
        state.count(settings.path)
        return state.will_end(patched.original(*args, **kwargs))
    recorder = current_recorder()
    if not isinstance(recorder, WatchedRecorder) or recorder.calls is not state.rederived_calls:
        with execution_context.counting_for(state.counts):
            return state.will_end(_run_planned(patched, args, kwargs))
    watch = recorder.watch
    is_told = settings.path not in recorder.untold
    if watch is not None and (not is_told or watch.passes(settings.path)):
        return _run_inside(recorder, patched, args, kwargs, is_told=is_told)
    recorder.enter(settings.path)
    try:
        with execution_context.counting_for(state.counts):
            return _run_planned(patched, args, kwargs)
    finally:
        recorder.leave()


def _run_inside(
    recorder: Any, patched: PatchedForward, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_told: bool
) -> Any:
    """Runs a call in a step that rederives by a program, which says all about it but what hangs on its number."""
    counts_calls = patched.settings.state.counts_calls
    inside, before = recorder.inside, recorder.deriving
    inside.append(patched.settings)
    try:
        if counts_calls:
            with execution_context.counting_for(patched.settings.state.counts):
                return _run_planned(patched, args, kwargs)
        return patched.original(*args, **kwargs)
    finally:
        if is_told and recorder.watch is not None:
            recorder.watch.passes(None)
        inside.pop()
        if recorder.watch is None and not counts_calls:  # the program has ended inside
            recorder.deriving = rederives_in(inside, by_default=before)


def _run_planned(patched: PatchedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    settings: Settings = patched.settings
    state = settings.state
    if settings.is_root:
        state.begin_step()
    prepared: _Prepared | None = patched.prepared
    if prepared is None or prepared.settings is not settings:
        prepared = patched.prepared = _Prepared(patched)
    call = state.count(settings.path) if state.counts_calls else 0
    decision, inside = prepared.always or (settings.decide(call), settings.regions(call, args))
    if inside:
        calls = dict(state.calls) if state.counts_calls else None
        return _Nested(patched, [prepared.region(r) for r in inside], decision, calls, call).run(0, *args, **kwargs)
    forward = settings.forward(patched, call)
    hook = None if decision is None else settings.hooks[type(decision)]
    begins_record = settings.records and current_recorder() is None and not inside_region()
    if begins_record and (hook is None or hook.records):
        by_default = decision is not None and decision.rederives
        if state.rederived_calls is not None:
            key = like_step(patched.module, args, kwargs)
            with rederived_step(state.rederived_calls, key, by_default=by_default, loss=state.loss):
                return forward(*args, **kwargs)
        with saved_tensor.rederive(by_default=by_default):
            _begin_offloading(patched, decision, args, kwargs)
            return forward(*args, **kwargs)
    with losses_in_place(state.loss) if settings.is_root and state.rederived_calls is not None else _nothing:
        if hook is None:
            return forward(*args, **kwargs)
        return hook.run(decision, patched, forward, args, kwargs)


def _begin_offloading(patched: PatchedForward, decision: Decision | None, args: Any, kwargs: Any) -> None:
    """Gives the recorder of a new step an offloader if the plan offloads anything."""
    recorder, offloading = current_recorder(), patched.settings.state.offloading
    if recorder is None or offloading is None or patched.module is None:
        return
    recorder.offloader = offloading.begin(patched.module, iterate_tensors((args, kwargs)))
    recorder.offloading = isinstance(decision, Offload)


class _Prepared:
    """What is the same in all calls of a patched module.

    Attributes:
        settings: what it was worked out from; a plan for several shapes has several.
        always: decision and regions of every call; None where they depend on its number or its arguments.
        decided: numbers of the calls that something is decided about, where it is known that the others run plainly.
    """

    __slots__ = ("_module", "_regions", "always", "decided", "settings")

    def __init__(self, patched: PatchedForward) -> None:
        self.settings: Settings = patched.settings
        self._module = patched._module
        self._regions: dict[int, _InRegion] = {}
        is_same = not self.settings.state.counts_calls and not self.settings.joins
        self.decided = self.settings.decided_calls()
        self.always = (self.settings.decide(0), self.settings.regions(0, ())) if is_same else None

    def region(self, region: Region) -> _InRegion:
        """Returns how calls run in a region."""
        found = self._regions.get(id(region))
        if found is None:
            found = self._regions[id(region)] = _InRegion(region, self.settings, self._module)
        return found


class _InRegion:
    """How calls of a module run in one of its regions.

    Attributes:
        span: identifies the span that the calls are part of.
        chunk: how many calls of a loop are one region; None outside of loops.
    """

    __slots__ = ("chunk", "member", "span")

    def __init__(self, region: Region, settings: Settings, module: Callable[[], Any]) -> None:
        by_default = region.inside == "rederive"
        self.chunk = region.chunk if isinstance(region, Loop) else None
        self.span = region if self.chunk or len(region.paths) > 1 else None
        self.member = Member(
            path=settings.path,
            module=module,  # weakly held: called, it returns the module
            buffers=settings.buffers,
            derives=by_default or settings.derives_below,
            derives_by_default=by_default,
            offloads=region.offload,
            keep=region.keep,
            unwritten=settings.state.unwritten.setdefault(settings.path, set()),
            places=settings.state.places.setdefault(settings.path, Places()),
        )


class _Nested:
    """A call inside nested regions; the first forward and every replay run it alike.

    Attributes:
        inside: the regions, the outermost first.
        decision: the call's decision that is no region.
        calls: number of earlier calls of each path, for decisions about single calls inside; None without these.
    """

    __slots__ = ("call", "calls", "decision", "inside", "patched", "ran")

    def __init__(
        self,
        patched: PatchedForward,
        inside: list[_InRegion],
        decision: Decision | None,
        calls: dict[str, int] | None,
        call: int,
    ) -> None:
        self.patched = patched
        self.inside = inside
        self.decision = decision
        self.calls = calls
        self.call = call
        self.ran = False

    def run(self, depth: int, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the call inside its regions from the `depth`-th on."""
        region = self.inside[depth]
        forward: Callable[..., Any] = functools.partial(self.run, depth + 1)
        if depth + 1 == len(self.inside):
            is_plain = self.calls is None and self.decision is None
            forward = self._own_forward() if is_plain else self._run_call
        begins_chunk = self.call % region.chunk == 0 if region.chunk else None
        return regions.run_region(region.member, forward, args, kwargs, span=region.span, begins_chunk=begins_chunk)

    def _own_forward(self) -> Callable[..., Any]:
        settings: Settings = self.patched.settings
        return settings.forward(self.patched, self.call)

    def _run_call(self, *args: Any, **kwargs: Any) -> Any:
        if self.decision is None:
            return self._run_again(*args, **kwargs)
        hook = self.patched.settings.hooks[type(self.decision)]
        return hook.run(self.decision, self.patched, self._run_again, args, kwargs)

    def _run_again(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward; in a replay, calls inside get the numbers of the first forward."""
        forward = self._own_forward()
        if self.calls is None or not self.ran:
            self.ran = True
            return forward(*args, **kwargs)
        state = self.patched.settings.state
        calls = state.calls
        current = dict(calls)
        calls.clear()
        calls.update(self.calls)
        try:
            return forward(*args, **kwargs)
        finally:
            calls.clear()
            calls.update(current)


def _run_compiled(patched: PatchedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a call under torch.compile: regions become `torch.utils.checkpoint`, other decisions are left out."""
    decisions, loss = patched.settings.decisions, patched.settings.state.loss
    for decision in (*decisions, *([loss] if loss is not None and patched.settings.is_root else ())):
        if not isinstance(decision, Region | Rederive | Save):
            tell_compiled(decision.action, type(patched.module).__name__, patched.settings.path)
    if not any(d.is_region and d.holds(0) for d in decisions):
        return patched.original(*args, **kwargs)
    from torch.utils.checkpoint import checkpoint

    return checkpoint(patched.original, *args, use_reentrant=False, **kwargs)
