"""Applies a plan to a model: validated first, in place, undoable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from recoup.errors import PlanMismatch
from recoup.ir.decision import (
    Decision,
    Loop,
    LossInPlace,
    Rebuild,
    Recompute,
    Rederive,
    Region,
    follow_programs,
)
from recoup.ir.labels import paths_around
from recoup.ir.plan import Plan
from recoup.runtime import execution_context
from recoup.runtime.card_room import CardRoom
from recoup.runtime.hooks import HOOKS, Hook
from recoup.runtime.kv_cache import caching_paths
from recoup.runtime.offload.offloaded_saved_tensor import Moves, Offloading
from recoup.runtime.offload.transport import Transport
from recoup.runtime.patch import Patched, PatchedForward, Runner, find_patch, patch_all, patched_methods, unpatch
from recoup.runtime.planned_call import Settings, run_call
from recoup.runtime.rebuild.apply_held import HeldSettings, HeldState, run_held, run_method
from recoup.runtime.recompute.rng_state import statistics_buffers
from recoup.runtime.step_log import StepLog
from recoup.runtime.step_state import StepState
from recoup.runtime.step_watch import StepWatch, find_watches
from recoup.runtime.tile.module.tiled import Proofs


class Applied:
    """A plan in place. `remove()` restores the model; as a context manager it does so at the end."""

    def __init__(self, model: nn.Module, patches: list[Patched], state: StepState | HeldState) -> None:
        self._patches = patches
        self._is_in_place = True  # also a plan of no decisions, whose steps are watched all the same
        self._state = state
        self.model = model
        self._watch: StepWatch | None = None
        self._room: CardRoom | None = None

    @classmethod
    def on(cls, model: nn.Module) -> Applied | None:
        """Returns a handle of the plan in place on a model, None if there is none: a copy has a plan nobody applied."""
        patches = find_all_patches(model)
        if not patches:
            return None
        return cls(model, patches, patches[0].settings.state)

    def watch(self, plan: Plan) -> None:
        """Has a card's memory reserved as planned; warns once if a step's peak passes the plan's budget.

        Replaces an earlier watch.
        """
        self._stop_watching()
        if self._is_in_place:
            _remove_watches(self.model)
            card = plan.predicted
            self._room = CardRoom(self.model, card.room_bytes, card.card_bytes)  # before the watch, which reads peaks
            self._watch = StepWatch(self.model, plan)

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
        if self._room is not None:
            self._room.remove()
            self._room = None

    def __repr__(self) -> str:
        state = f"in place on {len(self._patches)} forwards of" if self._is_in_place else "removed from"
        return f"<Applied: {state} {type(self.model).__name__}>"

    def remove(self) -> None:
        """Restores every forward that was changed; may be called twice."""
        self._stop_watching()
        self._is_in_place = False
        is_on = bool(self._patches)
        if is_on:
            _remove_watches(self.model)
        while self._patches:
            unpatch(self._patches.pop())
        for copied in find_all_patches(self.model) if is_on else ():  # deep copies of patched modules in this model
            unpatch(copied)
        if isinstance(self._state, StepState):
            self._state.places.clear()  # what regions noted of the model's objects
        if self._state.offloading is not None:
            self._state.offloading.close()

    @property
    def log(self) -> StepLog:
        """Counts of events since the plan was applied, on all threads: `applied.log - before` is one step's."""
        return self._state.counts.log

    @property
    def moves(self) -> Moves | None:
        """Bytes moved to the host and back since the plan was applied; None if it offloads nothing."""
        return self._state.offloading.moves if self._state.offloading is not None else None

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Runs the plain model inside the block."""
        before, self._state.suspended = self._state.suspended, True
        try:
            with execution_context.unwatched():
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
    proofs: Proofs | None = None,
) -> Applied:
    """Replaces the forwards of the modules that `decisions` name; nothing else is changed.

    Args:
        model: the model.
        decisions: those of a plan.
        transport: how offloaded tensors are moved, see `recoup.offload`; "auto": "cuda" on a GPU, otherwise "disk".
        hooks: how decisions of each class change a call.
        proofs: proofs of tiled modules from earlier plans for this model and batch; None: none are known.

    Raises:
        PlanMismatch: if a path is not in the model.
        UsageError: if a decision cannot be applied to its module. Nothing was changed.
    """
    by_path: dict[str, list[Decision]] = {}
    joins: dict[str, list[Recompute]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    if all(d.path in modules for d in decisions):
        for prepare in dict.fromkeys(hooks[type(d)].prepare for d in decisions if type(d) in hooks):
            decisions = prepare(modules, decisions)
    for decision in decisions:
        if not isinstance(decision, LossInPlace):
            by_path.setdefault(decision.path, []).append(decision)
        for path in dict.fromkeys(decision.paths[1:]):  # a module that the span calls twice is patched once
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
    loss = next((d for d in decisions if isinstance(d, LossInPlace)), None)
    state = StepState(
        counts_calls=any(d.call is not None or isinstance(d, Loop) for d in decisions),
        offloading=Offloading(transport) if offloads else None,
        proofs=proofs,
        only_rederives=follow_programs(decisions),
        loss=loss,
    )
    paths = dict.fromkeys([*by_path, *joins])
    caching = caching_paths(modules, [d.path for d in decisions if d.is_region])
    paths.update(dict.fromkeys(caching))
    records = any(d.records for d in decisions)
    if state.counts_calls or joins or records or loss is not None:
        paths.setdefault("", None)
    # Calls inside of which some decision rederives.
    deriving = {around for d in decisions if isinstance(d, Rederive) for around in ("", *paths_around(d.path))}
    wanted: list[tuple[nn.Module, Runner, Settings]] = []
    for path in paths:
        prefix = f"{path}." if path else ""
        settings = Settings(
            path=path,
            decisions=tuple(by_path.get(path, ())),
            joins=tuple(joins.get(path, ())),
            derives_below=not deriving.isdisjoint([path, *(p for d in by_path.get(path, ()) for p in d.paths[1:])]),
            buffers=_buffers(modules[path], prefix, [*by_path.get(path, ()), *joins.get(path, ())]),
            state=state,
            is_root=path == "",
            hooks={type(d): hooks[type(d)] for d in by_path.get(path, ()) if type(d) in hooks},
            drops_cache=path in caching,
            records=records and path == "",
        )
        wanted.append((modules[path], run_call, settings))
    return Applied(model, patch_all(wanted), state)


def _apply_rebuild(model: nn.Module, decision: Rebuild, decisions: Sequence[Decision]) -> Applied:
    """Patches every module, so that the record of a step knows which call each op belongs to."""
    loss = next((d for d in decisions if isinstance(d, LossInPlace)), None)
    if len(decisions) > 1 + (loss is not None):
        other = next(d for d in decisions if d is not decision and d is not loss)
        raise PlanMismatch(
            f"`rebuild` decides about the whole step and stands alone, but for `loss-in-place`; the plan also has "
            f"{other.action!r} for `{other.path}`. Make a plan with one or the other."
        )
    for entry in decision.entries:
        if entry.method and not callable(getattr(model.get_submodule(entry.path), entry.method, None)):
            raise PlanMismatch(
                f"The plan names `{entry.key}`, which {type(model).__name__} does not have. Make a plan for this model."
            )
    state = HeldState(decision, loss)
    wanted = [
        (module, run_held, HeldSettings(path=path, state=state))
        for path, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)  # its ops belong to the call around it
    ]
    methods = [
        (model.get_submodule(e.path), run_method, HeldSettings(path=e.path, state=state, entry=e.key), e.method)
        for e in decision.entries
        if e.method
    ]
    return Applied(model, patch_all(wanted, methods), state)


def _buffers(module: nn.Module, prefix: str, decisions: Sequence[Decision]) -> tuple[str, ...]:
    """Returns the names, relative to the module, of buffers that a replay must not change again."""
    if not any(d.is_region for d in decisions):
        return ()
    regions_here = [d for d in decisions if isinstance(d, Region)]
    seen = [name.removeprefix(prefix) for d in regions_here for name in d.buffers if name.startswith(prefix)]
    return tuple(dict.fromkeys([*statistics_buffers(module.named_modules()), *seen]))


def find_patches(model: nn.Module) -> list[PatchedForward]:
    """Returns the patched forwards of the plan that is in place on `model`."""
    found = map(find_patch, model.modules())
    return [f for f in found if f is not None and f.runner in (run_call, run_held)]


def find_all_patches(model: nn.Module) -> list[Patched]:
    """Returns the patched forwards of that plan, and its other patched methods."""
    found: list[Patched] = list(find_patches(model))
    found += [method for module in model.modules() for method in patched_methods(module)]
    return found


@contextlib.contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Suspends the plan that is in place on the model, if any, inside of the block."""
    states = {id(f.settings.state): f.settings.state for f in find_patches(model)}
    before = [(state, state.suspended) for state in states.values()]
    for state in states.values():
        state.suspended = True
    try:
        yield
    finally:
        for state, suspended in before:
            state.suspended = suspended


def _remove_watches(model: nn.Module) -> None:
    """Removes the watches of a model's steps, and what is left of one in a deep copy."""
    for watch in find_watches(model):
        watch.remove()
    tables = (model._forward_pre_hooks, model._forward_hooks)
    flags = (model._forward_pre_hooks_with_kwargs, model._forward_hooks_always_called)
    for table, flagged in zip(tables, flags, strict=True):
        for number in [n for n, hook in table.items() if isinstance(getattr(hook, "__self__", None), StepWatch)]:
            del table[number]
            flagged.pop(number, None)
