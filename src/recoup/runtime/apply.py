"""Applying a plan to a model: validated first, in place, undoable."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup._pytree import iterate_tensors
from recoup.errors import PlanMismatch
from recoup.ir.decision import (
    Decision,
    Loop,
    Offload,
    Rebuild,
    Recompute,
    Rederive,
    Region,
    Save,
    Scan,
)
from recoup.ir.plan import Plan
from recoup.runtime import execution_context, scan_bytes
from recoup.runtime.hooks import HOOKS, Hook
from recoup.runtime.kv_cache import caching_paths, without_cache
from recoup.runtime.offload.offloaded_saved_tensor import Moves, Offloading
from recoup.runtime.offload.transport import Transport
from recoup.runtime.patch import PatchedForward, find_patch, patch, unpatch
from recoup.runtime.rebuild import saved_tensor
from recoup.runtime.rebuild.apply_held import HeldSettings, HeldState, run_held
from recoup.runtime.rebuild.lineage import current_recorder
from recoup.runtime.recompute import region as regions
from recoup.runtime.recompute.object_state import Places
from recoup.runtime.recompute.rng_state import statistics_buffers
from recoup.runtime.step_log import Counts, StepLog
from recoup.runtime.step_watch import StepWatch
from recoup.runtime.tile.module.tiled import Proofs


class StepState:
    """What the patched forwards of one model share: which call of each path comes next."""

    def __init__(self, *, counts_calls: bool, offloading: Offloading | None = None) -> None:
        self.counts_calls = counts_calls
        self.offloading = offloading
        self.calls: dict[str, int] = {}
        self.proofs = Proofs()
        self.counts = Counts()
        self.unwritten: dict[str, set[int]] = {}
        self.places: dict[str, Places] = {}
        self.suspended = False

    def __deepcopy__(self, memo: dict[int, Any]) -> StepState:
        copied = StepState(counts_calls=self.counts_calls, offloading=copy.deepcopy(self.offloading, memo))
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> Any:
        return _new_state, (self.counts_calls, self.offloading)


def _new_state(counts_calls: bool, offloading: Offloading | None = None) -> StepState:
    return StepState(counts_calls=counts_calls, offloading=offloading)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What one patched forward does.

    Attributes:
        decisions: those of its path; one with a call number holds for that call only. Several regions of one call nest,
            the outermost first.
        joins: spans that its calls are part of without beginning them, the outermost first. derives_below: a decision
            inside rederives.
        records: it is the model itself, and lineage is recorded for rederive decisions somewhere below: the ops that
            lead to a tensor may lie in other calls than the one that saves it.
        hooks: how decisions of each class among them change a call.
        drops_cache: it would fill a key-value cache (`use_cache`), which a replay below it would fill again.
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
        """Returns the decision for the given call that is not a region, if there is one."""
        return next((d for d in self.decisions if d.holds(call) and not isinstance(d, Region | Scan)), None)

    def regions(self, call: int, args: Any) -> list[Region]:
        """Returns the regions that the given call is in or begins, the outermost first.

        A decision's call number is that of the call its span begins with; what it is handed tells whether a later
        call belongs to it.
        """
        inside = [d for d in self.joins if regions.continues(d, d.span, self.path, args)]
        return inside + [
            d
            for d in self.decisions
            if isinstance(d, Region) and d.holds(call) and not any(d is other for other in inside)
        ]

    def forward(self, patched: PatchedForward, call: int) -> Callable[..., Any]:
        """Returns what runs the module's own forward in the given call, its scans in the bytes decided for them."""
        found = {d.index: d.budget_bytes for d in self.decisions if isinstance(d, Scan) and d.holds(call)}
        return functools.partial(_run_scans, patched.original, found) if found else patched.original


def _run_scans(forward: Callable[..., Any], bytes_of: dict[int, int], /, *args: Any, **kwargs: Any) -> Any:
    with scan_bytes.ScansIn(bytes_of):
        return forward(*args, **kwargs)


def _run(patched: PatchedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    settings: Settings = patched.settings
    state = settings.state
    if state.suspended or not torch.is_grad_enabled() or _torch.inside_transform():
        return patched.original(*args, **kwargs)
    if torch.compiler.is_exporting():
        return patched.original(*args, **kwargs)
    if settings.drops_cache:
        args, kwargs = without_cache(patched.module, args, kwargs)
    if torch.compiler.is_compiling():
        return _run_compiled(patched, args, kwargs)
    with execution_context.counting_for(state.counts):
        return _run_planned(patched, args, kwargs)


def _run_planned(patched: PatchedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    settings: Settings = patched.settings
    state = settings.state
    if settings.is_root:
        state.calls.clear()
    call = 0
    if state.counts_calls:
        call = state.calls.get(settings.path, 0)
        state.calls[settings.path] = call + 1
    decision = settings.decide(call)
    inside = settings.regions(call, args)
    if inside:
        calls = dict(state.calls) if state.counts_calls else None
        return _Nested(patched, inside, decision, calls, call=call)(*args, **kwargs)
    forward = settings.forward(patched, call)
    hook = None if decision is None else settings.hooks[type(decision)]
    begins_record = settings.records and current_recorder() is None and not regions.inside_region()
    if begins_record and (hook is None or hook.records):
        with saved_tensor.rederive(by_default=decision is not None and decision.rederives):
            _begin_offloading(patched, decision, args, kwargs)
            return forward(*args, **kwargs)
    if hook is None:
        return forward(*args, **kwargs)
    return hook.run(decision, patched, forward, args, kwargs)


def _begin_offloading(patched: PatchedForward, decision: Decision | None, args: Any, kwargs: Any) -> None:
    """Gives the recorder of a step that just began an offloader, if the plan offloads anything."""
    recorder, offloading = current_recorder(), patched.settings.state.offloading
    if recorder is None or offloading is None or patched.module is None:
        return
    recorder.offloader = offloading.begin(patched.module, iterate_tensors((args, kwargs)))
    recorder.offloading = isinstance(decision, Offload)


class _Nested:
    """A call inside regions within regions, from the `depth`-th region on: the forward and every replay run it alike.

    Attributes:
        member: the `depth`-th region, whose forward is the rest of them; None for the module itself.
        span: names the span that it is part of. decision: what else was decided for the call.
        calls: how often each path had been called before, for decisions about single calls inside; None without them.
    """

    __slots__ = ("begins_chunk", "call", "calls", "decision", "member", "patched", "ran", "span")

    def __init__(
        self,
        patched: PatchedForward,
        inside: list[Region],
        decision: Decision | None,
        calls: dict[str, int] | None,
        depth: int = 0,
        call: int = 0,
    ) -> None:
        self.patched = patched
        self.call = call
        self.decision = decision
        self.calls = calls
        self.ran = False
        self.member: regions.Member | None = None
        self.span: Region | None = None
        self.begins_chunk: bool | None = None
        if depth == len(inside):
            return
        settings: Settings = patched.settings
        region = inside[depth]
        by_default = region.inside == "rederive"
        chunk = region.chunk if isinstance(region, Loop) else None
        self.span = region if chunk or len(region.paths) > 1 else None
        self.begins_chunk = call % chunk == 0 if chunk else None
        self.member = regions.Member(
            path=settings.path,
            module=patched._module,  # type: ignore[arg-type]  # weakly held: called, it returns the module
            forward=_Nested(patched, inside, decision, calls, depth + 1, call),
            buffers=settings.buffers,
            derives=by_default or settings.derives_below,
            derives_by_default=by_default,
            offloads=region.offload,
            keep=region.keep,
            unwritten=settings.state.unwritten.setdefault(settings.path, set()),
            places=settings.state.places.setdefault(settings.path, Places()),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.member is None:
            return self._run(args, kwargs)
        return regions.run_region(self.member, args, kwargs, span=self.span, begins_chunk=self.begins_chunk)

    def _run(self, args: Any, kwargs: Any) -> Any:
        original = self.patched.settings.forward(self.patched, self.call)
        forward = functools.partial(self._run_again, original)
        if self.decision is None:
            return forward(*args, **kwargs)
        hook = self.patched.settings.hooks[type(self.decision)]
        return hook.run(self.decision, self.patched, forward, args, kwargs)

    def _run_again(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own forward, in a replay with the numbers that calls inside had the first time."""
        if self.calls is None or not self.ran:
            self.ran = True
            return original(*args, **kwargs)
        calls = self.patched.settings.state.calls
        current = dict(calls)
        calls.clear()
        calls.update(self.calls)
        try:
            return original(*args, **kwargs)
        finally:
            calls.clear()
            calls.update(current)


def _run_compiled(patched: PatchedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Under torch.compile regions are torch's own (Dynamo knows them); rederive is left to the compiler."""
    if not any(d.is_region and d.holds(0) for d in patched.settings.decisions):
        return patched.original(*args, **kwargs)
    from torch.utils.checkpoint import checkpoint

    return checkpoint(patched.original, *args, use_reentrant=False, **kwargs)


class Applied:
    """A plan in place. `remove()` restores the model; as a context manager it does so at the end."""

    def __init__(self, model: nn.Module, patches: list[PatchedForward], state: StepState | HeldState) -> None:
        self._patches = patches
        self._state = state
        self.model = model
        self._watch: StepWatch | None = None

    def watch(self, plan: Plan) -> None:
        """Has a step that passes the plan's budget warned of, once; what was watched for before is not any more."""
        if self._watch is not None:
            self._watch.remove()
        self._watch = StepWatch(self.model, plan) if self._patches else None

    def __repr__(self) -> str:
        state = f"in place on {len(self._patches)} forwards of" if self._patches else "removed from"
        return f"<Applied: {state} {type(self.model).__name__}>"

    def remove(self) -> None:
        """Restores every forward that was changed; safe to call twice."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
        while self._patches:
            unpatch(self._patches.pop())
        if self._state.offloading is not None:
            self._state.offloading.close()

    @property
    def log(self) -> StepLog:
        """What ran since the plan was applied: `applied.log - before` is what one step did, on whatever thread."""
        return self._state.counts.log

    @property
    def moves(self) -> Moves | None:
        """What was moved to the host and back since the plan was applied; None if it offloads nothing."""
        return self._state.offloading.moves if self._state.offloading is not None else None

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Runs the plain model inside the block."""
        before, self._state.suspended = self._state.suspended, True
        try:
            yield
        finally:
            self._state.suspended = before

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def apply_decisions(
    model: nn.Module,
    decisions: Sequence[Decision],
    *,
    transport: Transport | str = "auto",
    hooks: Mapping[type[Decision], Hook] = HOOKS,
) -> Applied:
    """Changes the forwards that `decisions` name, and nothing else.

    Args:
        transport: how offloaded tensors are moved, see `recoup.offload`; "auto" is "cuda" on a GPU, else "disk".
        hooks: how decisions of each class change a call.

    Raises:
        PlanMismatch: if a path is not in the model. UsageError: if a decision cannot be applied there. Nothing was
            changed then.
    """
    by_path: dict[str, list[Decision]] = {}
    joins: dict[str, list[Recompute]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    if all(d.path in modules for d in decisions):
        for prepare in dict.fromkeys(hooks[type(d)].prepare for d in decisions if type(d) in hooks):
            decisions = prepare(modules, decisions)
    for decision in decisions:
        by_path.setdefault(decision.path, []).append(decision)
        for path in dict.fromkeys(decision.paths[1:]):  # a module that the span calls twice joins it once
            if isinstance(decision, Rebuild):
                by_path.setdefault(path, [])
                continue
            assert isinstance(decision, Recompute), "only regions of single calls span others"
            joins.setdefault(path, []).append(decision)
    missing = [path for path in [*by_path, *joins] if path not in modules]
    if missing:
        raise PlanMismatch(
            f"The plan names `{missing[0]}`"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + f", which {type(model).__name__} does not have. Make a plan for this model."
        )
    if not decisions:
        return Applied(model, [], StepState(counts_calls=False))
    rebuild = next((d for d in decisions if isinstance(d, Rebuild)), None)
    if rebuild is not None:
        return _apply_rebuild(model, rebuild, decisions)
    offloads = any(d.offloads for d in decisions)
    state = StepState(
        counts_calls=any(d.call is not None or isinstance(d, Loop) for d in decisions),
        offloading=Offloading(transport) if offloads else None,
    )
    patches: list[PatchedForward] = []
    paths = dict.fromkeys([*by_path, *joins])
    caching = caching_paths(modules, [d.path for d in decisions if d.is_region])
    paths.update(dict.fromkeys(caching))
    records = offloads or any(isinstance(d, Rederive) or (d.path == "" and isinstance(d, Save)) for d in decisions)
    if state.counts_calls or joins or records:
        paths.setdefault("", None)
    for path in paths:
        prefix = f"{path}." if path else ""
        settings = Settings(
            path=path,
            decisions=tuple(by_path.get(path, ())),
            joins=tuple(joins.get(path, ())),
            derives_below=_derives_below(decisions, [path, *(p for d in by_path.get(path, ()) for p in d.paths[1:])]),
            buffers=_buffers(modules[path], prefix, [*by_path.get(path, ()), *joins.get(path, ())]),
            state=state,
            is_root=path == "",
            hooks={type(d): hooks[type(d)] for d in by_path.get(path, ()) if type(d) in hooks},
            drops_cache=path in caching,
            records=records and path == "",
        )
        patches.append(patch(modules[path], _run, settings))
    return Applied(model, patches, state)


def _apply_rebuild(model: nn.Module, decision: Rebuild, decisions: Sequence[Decision]) -> Applied:
    """Patches every module: the record of a step says which call each op belongs to."""
    if len(decisions) > 1:
        other = next(d for d in decisions if d is not decision)
        raise PlanMismatch(
            f"`rebuild` decides about the whole step and stands alone; the plan also has {other.action!r} for "
            f"`{other.path}`. Make a plan with one or the other."
        )
    state = HeldState(decision)
    patches = [
        patch(module, run_held, HeldSettings(path=path, state=state))
        for path, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)  # what runs inside belongs to the call around it
    ]
    return Applied(model, patches, state)


def _derives_below(decisions: Sequence[Decision], paths: Sequence[str]) -> bool:
    """Whether a decision inside one of these calls rederives."""
    prefixes = tuple(f"{path}." if path else "" for path in paths)
    return any(isinstance(d, Rederive) and (d.path.startswith(prefixes) or d.path in paths) for d in decisions)


def _buffers(module: nn.Module, prefix: str, decisions: Sequence[Decision]) -> tuple[str, ...]:
    """Returns the names, below the module, of buffers that a replay must not change again."""
    if not any(d.is_region for d in decisions):
        return ()
    regions_here = [d for d in decisions if isinstance(d, Region)]
    seen = [name.removeprefix(prefix) for d in regions_here for name in d.buffers if name.startswith(prefix)]
    return tuple(dict.fromkeys([*statistics_buffers(module.named_modules()), *seen]))


def find_patches(model: nn.Module) -> list[PatchedForward]:
    """Returns the patched forwards of a plan that is in place on `model`."""
    found = map(find_patch, model.modules())
    return [f for f in found if f is not None and f.runner in (_run, run_held)]


@contextlib.contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Runs the model without the plan that is in place on it, if any."""
    states = {id(f.settings.state): f.settings.state for f in find_patches(model)}
    before = [(state, state.suspended) for state in states.values()]
    for state in states.values():
        state.suspended = True
    try:
        yield
    finally:
        for state, suspended in before:
            state.suspended = suspended
