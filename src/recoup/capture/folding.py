"""Leaves out the inside of calls that repeat: a loop over time is captured in about as many ops as a few of its steps.

A module that one parent calls many times is run in full for its first and last calls. A call between them is handed
the same kind of arguments and finds the same kind of state; it is not run but *folded*: it returns fresh fake tensors
like those of the calls before, linked by one autograd node, and leaves a mark in the tracker where its ops would be, in
forward and in backward. `unfolding` puts in, at every mark, what the executed calls did there, and proves while it
does so that the executed calls before and after did the same. Whatever is not alike ends the folding: the step is
captured in full.

Ops between the calls are run and recorded as always. What a folded call cannot show is a forward that changes its ways
in the middle of the loop by something that is neither an argument nor kept in its modules (a global counter).
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from recoup import _compat
from recoup.capture.calls import CallRecorder
from recoup.capture.tracker import Tracker
from recoup.engine import regions
from recoup.engine.attributes import walk
from recoup.engine.lineage import Value, current_recorder
from recoup.engine.patch import find_patch
from recoup.engine.rederive import Kept

_WATCHED_CALLS = 24
_FIRST_STEPS, _LAST_STEPS = 4, 4
_FIRST_CHUNKS, _LAST_CHUNKS = 3, 4
_FEWEST_FOLDED = 8
_RECOUNTS = 8
_LOOKED_AT = 64  # values of a real tensor
_PLAIN_TYPES = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size, slice}
)
_SKIPPED = (frozenset(nn.Module().__dict__) | {"forward"}) - {"training"}
_DEPTH = 3


class Irregular(BaseException):
    """The calls of a loop are not alike; says which loop and why. No error: the step is captured in full.

    Attributes:
        path: of the module, "" if several may be meant.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class _Unlike(Exception):
    """A tensor is of a kind that cannot be made anew."""


class Counted(BaseException):
    """The forward of a step was run to count the calls of its loops; no error, so no model's `except` may eat it."""


@dataclasses.dataclass
class FoldingMemory:
    """What is known of a step's loops, from one capture to the next.

    Attributes:
        num_calls: of each module path that may be folded. excluded: paths whose calls are not alike.
        reasons: why captures of the step were not folded, for people. recounts: how often numbers were found changed.
    """

    num_calls: dict[str, int] = dataclasses.field(default_factory=dict)
    excluded: set[str] = dataclasses.field(default_factory=set)
    reasons: list[str] = dataclasses.field(default_factory=list)
    recounts: int = 0

    def exclude(self, path: str) -> bool:
        """Forgets a loop, "": all of them; returns whether that is news."""
        gone = {path} if path else set(self.num_calls)
        is_news = not gone <= self.excluded
        self.excluded |= gone
        for name in gone:
            self.num_calls.pop(name, None)
        return is_news


@dataclasses.dataclass(frozen=True, slots=True)
class Zone:
    """Calls `start` to `stop` of a loop; `period` of them are a unit. Those from `low` to `high` are folded."""

    start: int
    stop: int
    period: int
    low: int
    high: int


@dataclasses.dataclass(slots=True)
class Block:
    """What a call of a loop is in the recording: ranges of ops, storages and the like, [first, last).

    Attributes:
        folded: its ops are not there: one mark stands for them.
        call: its index in the recorder's calls. rederived: how many saved tensors it rederives.
        slots: storages that stand for results: {storage: result}; in backward {storage: input}.
        given: in backward of a folded call: which results got a gradient. executed_given: of one that was run.
    """

    path: str
    index: int
    folded: bool
    ops: tuple[int, int]
    saves: tuple[int, int] = (0, 0)
    links: tuple[int, int] = (0, 0)
    calls: tuple[int, int] = (0, 0)
    rederived: int = 0
    slots: dict[int, int] = dataclasses.field(default_factory=dict)
    inputs: tuple[int, ...] = ()
    given: tuple[bool, ...] | None = None


class _Slot:
    """Stands for the i-th result tensor in what a call returns, or leaves in an attribute."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@dataclasses.dataclass(slots=True)
class _Entry:
    """What a call finds: a description of everything but the tensors' identity, and the tensors."""

    description: Any
    tensors: list[torch.Tensor]
    state: list[tuple[dict[str, Any], str, Any]]


@dataclasses.dataclass(slots=True)
class _Result:
    """One result tensor of a call: the input that it is, or how to make one like it.

    `storage`: counted from the first storage that the call made.
    """

    traits: tuple[Any, ...]
    source: int
    storage: int
    template: _compat.FakeTemplate | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Lineage:
    """What the recorder of a rederive plan knows after a call that it did not before.

    Attributes:
        turns: how many saved tensors it counted. inputs, results: those that are kept from this call on.
        derived: results that are not kept, and might be rebuilt.
    """

    turns: int = 0
    inputs: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    derived: tuple[int, ...] = ()


class _Unknown(Value):
    """What a result of a folded call might be rebuilt from is not known: nobody may ask."""

    __slots__ = ("folding",)
    folding: Folding

    def alive(self) -> Any | None:
        """Returns what keeps it; a question that only ops that are compared may ask."""
        found = super().alive()
        if found is None and not self.folding.comparing:
            self.folding.failed = "a tensor might be rebuilt from what a folded call made"
        return found


@dataclasses.dataclass(slots=True)
class Surface:
    """What can be seen of a call from outside, enough to stand for it."""

    description: Any
    results: list[_Result]
    output: Any
    changes: list[tuple[dict[str, Any], str, Any]]
    flows: tuple[int, ...]
    gradients: list[_compat.FakeTemplate]
    num_calls: dict[str, int]
    shapes: Any
    held: tuple[tuple[int, ...], tuple[int, ...]]
    lineage: _Lineage

    def looks(self) -> Any:
        """Returns what must be the same for two calls to be alike."""
        return (
            self.description,
            [(r.traits, r.source, r.storage) for r in self.results],
            [(id(table), name) for table, name, _ in self.changes],
            self.flows,
            self.num_calls,
            self.shapes,
            self.held,
            self.lineage,
        )


class _Bridge(torch.autograd.Function):
    """The one node of a folded call: marks where its forward and its backward are, computes nothing."""

    @staticmethod
    def forward(ctx: Any, loop: Loop, surface: Surface, index: int, anchor: Any, *inputs: torch.Tensor) -> Any:
        ctx.loop, ctx.surface, ctx.index, ctx.block = loop, surface, index, None
        ctx.set_materialize_grads(False)
        made = loop.mark_forward(surface, index)
        ctx.held = loop.holding = []  # filled when all results are there
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return (None, None, None, None, *ctx.loop.mark_backward(ctx, grads))


class Loop:
    """One module that is called many times.

    Attributes:
        counts: its calls are counted only; how many there are is not known.
    """

    def __init__(
        self,
        folding: Folding,
        path: str,
        module: nn.Module,
        num_calls: int | None,
        zones: list[Zone],
        first: int,
    ) -> None:
        self.path = path
        self.counts = num_calls is None
        self.index = first
        self.zones = zones
        self.num_calls = num_calls
        self.forwards: dict[int, Block] = {}
        self.backwards: dict[int, Block] = {}
        self.surfaces: dict[int, Surface] = {}
        self.holding: list[Any] = []
        self._compares = False
        self._first = first
        self._folding = folding
        self._modules = [m for _, m in walk(module)]
        self._seen: list[weakref.ref[torch.Tensor]] = []
        self._parent: int | None = None

    def zone(self, index: int) -> Zone | None:
        """Returns the zone whose folded calls the given one is among, None if it is run."""
        if self.counts:
            begin = self._first + _FIRST_STEPS
            return Zone(self._first, 1 << 62, 1, begin, 1 << 62) if index >= begin else None
        return next((z for z in self.zones if z.low <= index < z.high), None)

    def run(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the next call, or stands for it."""
        try:
            return self._run(original, args, kwargs)
        except _Unlike:
            raise Irregular(self.path, "a tensor is of a kind that cannot be made anew") from None

    def _run(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        folding = self._folding
        tracker, recorder = folding.tracker, folding.recorder
        if not recorder.listens():
            return original(*args, **kwargs)
        parent = recorder.calls[tracker.call].parent
        if self._parent not in (None, parent) or regions.inside_region():
            raise Irregular(self.path, "it is called by several calls")
        self._parent = parent
        index, self.index = self.index, self.index + 1
        entry = self._enter(args, kwargs)
        zone = self.zone(index)
        # From the first folded call to the end of the last one that is compared with them.
        self._compare(any(z.low <= index < z.high + z.period for z in self.zones) or self.counts)
        if zone is None:
            return self._execute(index, entry, original, args, kwargs)
        if self.counts:
            tracker.counting = True  # nothing of this run will be used
        surface = self.surfaces.get(zone.low - zone.period + (index - zone.low) % zone.period)
        if surface is None or surface.description != entry.description:
            raise Irregular(self.path, f"call {index} is given something else than the calls before")
        return self._stand_in(surface, index, entry)

    def _compare(self, compares: bool) -> None:
        if compares != self._compares:
            self._compares = compares
            self._folding.comparing += 1 if compares else -1

    # -- what a call finds --------------------------------------------------------------------------------------

    def _enter(self, args: Any, kwargs: Any) -> _Entry:
        tensors: list[torch.Tensor] = []
        seen: dict[int, int] = {}
        state = self._state()
        shape = (
            _describe((args, kwargs), tensors, seen),
            tuple((id(table), name, _describe(value, tensors, seen)) for table, name, value in state),
        )
        storages: dict[int, int] = {}
        traits = []
        before = [ref() for ref in self._seen]
        for i, tensor in enumerate(tensors):
            is_static = i < len(before) and before[i] is tensor
            traits.append(
                (_traits(tensor), is_static, storages.setdefault(tensor.untyped_storage()._cdata, len(storages)))
            )
        self._seen = [weakref.ref(t) for t in tensors]
        recorder = current_recorder()
        about = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            tuple(id(p) for m in self._modules for p in m._parameters.values()),
            id(recorder),
            recorder.deriving if recorder is not None else None,
        )
        return _Entry((shape, tuple(traits), about), tensors, state)

    def _state(self) -> list[tuple[dict[str, Any], str, Any]]:
        found = []
        for module in self._modules:
            attributes = module.__dict__
            for name, value in attributes.items():
                if name not in _SKIPPED:
                    found.append((attributes, name, value))
            for name, value in module._buffers.items():
                found.append((module._buffers, name, value))
        return found

    # -- calls that are run -------------------------------------------------------------------------------------

    def _execute(self, index: int, entry: _Entry, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tracker, recorder = self._folding.tracker, self._folding.recorder
        is_model = self._is_model(index)
        chance = random.getstate() if is_model else None
        num_calls = self._num_calls()
        node = _compat.next_node_number()
        ops, saves, links, rederived = (
            len(tracker.ops),
            len(tracker.saves),
            len(tracker.rederive_links),
            tracker.num_rederived,
        )
        call, first_storage = tracker.call, len(tracker.storages)
        kept_before = self._kept(entry.tensors) if is_model else None
        output = original(*args, **kwargs)
        if any(index == z.high + z.period - 1 for z in self.zones):
            self._compare(False)
        block = self.forwards[index] = Block(
            path=self.path,
            index=index,
            folded=False,
            ops=(ops, len(tracker.ops)),
            saves=(saves, len(tracker.saves)),
            links=(links, len(tracker.rederive_links)),
            calls=(call, len(recorder.calls)),
            rederived=tracker.num_rederived - rederived,
            inputs=self._find(entry.tensors),
        )
        if is_model:
            after = self._num_calls()
            made = {p: n - num_calls.get(p, 0) for p, n in after.items() if n != num_calls.get(p, 0)}
            if chance != random.getstate():
                raise Irregular(self.path, "it draws from Python's random numbers")
            self.surfaces[index] = self._surface(entry, output, node, first_storage, made, block, kept_before)
            before = self.surfaces.get(index - self._period(index))
            if before is not None and before.looks() != self.surfaces[index].looks():
                raise Irregular(self.path, f"call {index} does something else than the one before")
        return output

    def _is_model(self, index: int) -> bool:
        """Whether the call is one that folded ones are compared with."""
        if self.counts:
            return self._first + _FIRST_STEPS - 2 <= index
        return any(z.low - 2 * z.period <= index < z.low or z.high <= index < z.high + 2 * z.period for z in self.zones)

    def _period(self, index: int) -> int:
        return next((z.period for z in self.zones if z.start <= index < z.stop), 1)

    def _find(self, tensors: list[torch.Tensor]) -> tuple[int, ...]:
        found = map(self._folding.tracker.find, tensors)
        return tuple(-1 if i is None else i for i in found)

    def _num_calls(self) -> dict[str, int]:
        """Returns how often the plan in place has counted each path so far."""
        counted = self._folding.counted
        return dict(counted) if counted is not None else {}

    def _surface(
        self,
        entry: _Entry,
        output: Any,
        node: int,
        first_storage: int,
        made: dict[str, int],
        block: Block,
        kept_before: Any,
    ) -> Surface:
        results: list[torch.Tensor] = []
        seen: dict[int, int] = {}
        shape = _describe(output, results, seen)
        after = self._state()
        if len(after) != len(entry.state) or any(
            a[0] is not b[0] or a[1] != b[1] for a, b in zip(after, entry.state, strict=True)
        ):
            raise Irregular(self.path, "its modules gain or lose attributes")
        changed = [new for new, old in zip(after, entry.state, strict=True) if new[2] is not old[2]]
        shapes = [_describe(value, results, seen) for _, _, value in changed]
        sources = {id(t): i for i, t in enumerate(entry.tensors)}
        tracker = self._folding.tracker
        made_results = []
        storages: set[int] = set()
        for tensor in results:
            source = sources.get(id(tensor), -1)
            traits = _traits(tensor)
            found = tracker.find(tensor)
            if source >= 0:
                made_results.append(_Result(traits, source, -1, None))
                continue
            whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
            if found is None or found < first_storage or found in storages or tensor.storage_offset() or not whole:
                raise Irregular(self.path, "a result shares memory with something else")
            storages.add(found)
            made_results.append(_Result(traits, -1, found - first_storage, _compat.FakeTemplate(tensor)))
        varying = [t for t, (_, is_static, _) in zip(entry.tensors, entry.description[1], strict=True) if not is_static]
        flows = _flows(entry.tensors, varying, [t for t in results if id(t) not in sources], node)
        given = [False] * len(results)
        block.given = ()

        def note(i: int) -> Callable[[torch.Tensor], None]:
            def hook(gradient: torch.Tensor) -> None:
                given[i] = True
                block.given = tuple(given)

            return hook

        for i, tensor in enumerate(results):
            if tensor.requires_grad and made_results[i].source < 0:
                tensor.register_hook(note(i))  # type: ignore[no-untyped-call]
        turn, inputs_kept, _ = self._kept(entry.tensors)
        _, results_kept, results_made = self._kept(results)
        fresh = [i for i, r in enumerate(made_results) if r.source < 0]
        lineage = _Lineage(
            turns=turn - kept_before[0],
            inputs=tuple(i for i, kept in enumerate(inputs_kept) if kept and not kept_before[1][i]),
            results=tuple(i for i in fresh if results_kept[i]),
            derived=tuple(i for i in fresh if not results_kept[i] and results_made[i]),
        )
        skeleton = _skeleton(output, seen)
        return Surface(
            description=entry.description,
            results=made_results,
            output=skeleton,
            changes=[(table, name, _skeleton(value, seen)) for table, name, value in changed],
            flows=flows,
            gradients=[_compat.FakeTemplate(self._like(entry.tensors[i])) for i in flows],
            num_calls=made,
            shapes=(shape, shapes),
            held=self._held(entry.tensors, results, block),
            lineage=lineage,
        )

    def _held(
        self, inputs: list[torch.Tensor], results: list[torch.Tensor], block: Block
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns which inputs and results autograd keeps for the call."""
        tracker = self._folding.tracker
        saved = {storage for _, _, storage, _ in tracker.saves[slice(*block.saves)]}
        known = {id(t) for t in inputs}
        return (
            tuple(i for i, t in enumerate(inputs) if tracker.find(t) in saved),
            tuple(i for i, t in enumerate(results) if id(t) not in known and tracker.find(t) in saved),
        )

    def _kept(self, tensors: list[torch.Tensor]) -> tuple[int, list[bool], list[bool]]:
        """Returns what the recorder of a rederive plan knows: its count, which tensors are kept, which are made."""
        recorder = current_recorder()
        if recorder is None:
            return 0, [False] * len(tensors), [False] * len(tensors)
        values = [recorder.value_of(t) for t in tensors]
        with self._folding.compared():
            kept = [v.kept is not None and v.alive() is not None for v in values]
        made = [v.made is not None or v.random_mask or type(v) is _Unknown for v in values]
        return recorder.turn, kept, made

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), self._folding.tracker.unobserved():
            return torch.empty_like(tensor)

    # -- calls that are left out --------------------------------------------------------------------------------

    def _stand_in(self, surface: Surface, index: int, entry: _Entry) -> Any:
        folding = self._folding
        if folding.counted is not None:
            for path, made in surface.num_calls.items():
                folding.counted[path] = folding.counted.get(path, 0) + made
        block = self.forwards[index] = Block(path=self.path, index=index, folded=True, ops=(0, 0))
        block.inputs = self._find(entry.tensors)
        inputs = [entry.tensors[i] for i in surface.flows]
        saved, linked = len(folding.tracker.saves), len(folding.tracker.rederive_links)
        if torch.is_grad_enabled():
            linked_results = _Bridge.apply(self, surface, index, folding.anchor, *inputs)  # type: ignore[no-untyped-call]
        else:
            linked_results = self.mark_forward(surface, index)
        block.saves, block.links = (saved, saved), (linked, linked)
        block.calls = (folding.tracker.call, folding.tracker.call + 1)
        fresh = iter(linked_results)
        results = []
        for i, result in enumerate(surface.results):
            if result.source >= 0:
                results.append(entry.tensors[result.source])
            elif result.traits[4]:
                results.append(next(fresh))
            else:
                results.append(self._make(result, block, i))
        if torch.is_grad_enabled():
            self.holding += [entry.tensors[i].untyped_storage() for i in surface.held[0]]
            self.holding += [results[i].untyped_storage() for i in surface.held[1]]
            self._stand_in_lineage(surface.lineage, entry.tensors, results)
        self.holding = []
        for table, name, skeleton in surface.changes:
            table[name] = _fill(skeleton, results)
        return _fill(surface.output, results)

    def _stand_in_lineage(self, lineage: _Lineage, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Tells the recorder of a rederive plan what it would know after the call."""
        recorder = current_recorder()
        if recorder is None:
            return
        recorder.turn += lineage.turns
        for i in lineage.derived:
            value = _Unknown()
            value.folding = self._folding
            recorder.set_value(results[i], value)
        with self._folding.tracker.unobserved():
            for tensor in [*(inputs[i] for i in lineage.inputs), *(results[i] for i in lineage.results)]:
                kept = Kept(tensor)
                recorder.value_of(tensor).kept = weakref.ref(kept)
                self.holding.append(kept)

    def mark_forward(self, surface: Surface, index: int) -> tuple[torch.Tensor, ...]:
        """Leaves the mark of a folded call's forward; returns its results that require gradients."""
        tracker = self._folding.tracker
        at = tracker.mark()
        block = self.forwards[index]
        block.ops = (at, at + 1)
        return tuple(self._make(r, block, i) for i, r in enumerate(surface.results) if r.source < 0 and r.traits[4])

    def _make(self, result: _Result, block: Block, i: int) -> torch.Tensor:
        assert result.template is not None
        made = result.template.new()
        block.slots[self._folding.tracker.add(made, "temporary", "")] = i
        return made

    def mark_backward(self, ctx: Any, grads: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor]:
        """Leaves the mark of a folded call's backward; returns gradients of what flows in."""
        tracker, surface = self._folding.tracker, ctx.surface
        at = tracker.mark()
        ctx.held.clear()
        wanted = iter(grads)
        given = tuple(next(wanted) is not None if r.source < 0 and r.traits[4] else False for r in surface.results)
        block = self.backwards[ctx.index] = Block(path=self.path, index=ctx.index, folded=True, ops=(at, at + 1))
        block.given = given
        block.inputs = self._find([g for g in grads if g is not None])
        ctx.block = block
        made = []
        for i, template in enumerate(surface.gradients):
            gradient = template.new()
            block.slots[tracker.add(gradient, "temporary", "")] = i
            made.append(gradient)
        return made


class Folding:
    """Folds the loops of one run of a step; a context manager, entered after the recorder.

    Attributes:
        loops: by path. failed: why the recording cannot be unfolded, if something came up in backward.
    """

    def __init__(self, model: nn.Module, tracker: Tracker, recorder: CallRecorder, memory: FoldingMemory) -> None:
        self.tracker = tracker
        self.recorder = recorder
        self.loops: dict[str, Loop] = {}
        self.failed = ""
        self.comparing = 0
        self._memory = memory
        self._watched: dict[tuple[str, int], int] = {}
        self._modules = dict(model.named_modules())
        self._placed: list[tuple[nn.Module, Any]] = []
        self.anchor = torch.empty(0, requires_grad=True)
        patches = [p for p in map(find_patch, model.modules()) if p is not None]
        states = [p.settings.state for p in patches if hasattr(p.settings, "state")]
        self.counted: dict[str, int] | None = states[0].calls if states else None
        self._chunks: dict[int, tuple[int, int]] = {}  # of how many calls: (calls a chunk, calls in chunks)
        for path, num_calls in memory.num_calls.items():
            chunks = find_chunks(self._modules, path, num_calls)
            if chunks is not None and chunks[0] > 1:
                self._chunks[num_calls] = chunks
        for path, num_calls in memory.num_calls.items():
            if self._can_fold(path):
                self._begin(path, num_calls, 0)

    def _can_fold(self, path: str) -> bool:
        module = self._modules[path]
        if module._backward_hooks or module._backward_pre_hooks:
            return False
        for _, below in walk(module):
            if below is module:
                continue
            if below._backward_hooks or below._backward_pre_hooks or below._forward_hooks or below._forward_pre_hooks:
                return False
        return True

    def _begin(self, path: str, num_calls: int | None, first: int) -> None:
        module = self._modules[path]
        zones = []
        self.tracker.counting = False  # its first calls are looked at closely
        if num_calls is not None:
            chunks = find_chunks(self._modules, path, num_calls)
            zones = [] if chunks is None else find_zones(num_calls, *self._chunks.get(num_calls, chunks))
            if not zones:
                return
        loop = Loop(self, path, module, num_calls, zones, first)
        self.loops[path] = loop
        self._placed.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = _FoldedForward(loop, module)

    def watch(self, path: str, parent: int) -> None:
        """Takes note of a call; one that comes again and again is counted from then on."""
        if path in self.loops or path in self._memory.excluded or parent < 0 or self._memory.num_calls:
            return
        count = self._watched[path, parent] = self._watched.get((path, parent), 0) + 1
        if count == _WATCHED_CALLS and not any(path.startswith(f"{p}.") for p in self.loops):
            if sum(p == path for p, _ in self._watched) > 1 or not _is_free_of_hooks(self._modules[path]):
                self._memory.excluded.add(path)
            else:
                self._begin(path, None, count)

    @contextlib.contextmanager
    def compared(self) -> Iterator[None]:
        """Marks what is compared with what other calls do: it may ask what it likes."""
        self.comparing += 1
        try:
            yield
        finally:
            self.comparing -= 1

    def end_forward(self) -> None:
        """Checks the numbers of calls.

        Raises:
            Counted: if the run was only to count them, or they are not what they were; the memory has the numbers.
            Irregular: if they never are.
        """
        counted = {p: loop.index for p, loop in self.loops.items() if loop.counts}
        for path, num_calls in counted.items():
            if not any(path.startswith(f"{p}.") for p in counted):
                self._memory.num_calls[path] = num_calls
        if counted:
            raise Counted
        changed = {p: loop.index for p, loop in self.loops.items() if loop.index != loop.num_calls}
        for path, num_calls in changed.items():
            if num_calls < _WATCHED_CALLS or self._memory.recounts >= _RECOUNTS:
                raise Irregular(path, f"it was called {num_calls} times, not {self.loops[path].num_calls}")
            self._memory.num_calls[path] = num_calls
        if changed:
            self._memory.recounts += 1
            raise Counted

    def takes(self, node: Any, func: Any, tensors: list[torch.Tensor], out: Any) -> bool:
        """Whether an op of backward only adds up what a folded call hands on; its result stands for that."""
        block = getattr(node, "block", None) if isinstance(node, _Bridge._backward_cls) else None  # type: ignore[attr-defined]
        if block is None:
            return False
        slots = [block.slots[i] for i in map(self.tracker.find, tensors) if i in block.slots]
        if func is not torch.ops.aten.add.Tensor or len(slots) != 1:
            self.failed = f"{func} runs where a folded call's gradients are handed on"
            return False
        found = self.tracker.add(out, "temporary", "")
        block.slots[found] = slots[0]
        return True

    @contextlib.contextmanager
    def on(self) -> Iterator[Folding]:
        """Folds inside the block."""
        self.recorder.watcher = self.watch
        self.tracker.bridge = self
        try:
            yield self
        finally:
            self.recorder.watcher = None
            self.tracker.bridge = None
            self.remove()

    def remove(self) -> None:
        """Puts the forwards back."""
        while self._placed:
            module, before = self._placed.pop()
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before


class _FoldedForward:
    """What a folded module's forward is for the time of a capture."""

    def __init__(self, loop: Loop, module: nn.Module) -> None:
        self._loop = loop
        before = module.__dict__.get("forward")
        self.__wrapped__ = before if before is not None else type(module).forward.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._loop.run(self.__wrapped__, args, kwargs)


def _is_free_of_hooks(module: nn.Module) -> bool:
    """Whether nobody but the recorder of calls has hooks on it, and on what is in it."""
    return all(
        not m._backward_hooks
        and not m._backward_pre_hooks
        and (m is module or (len(m._forward_hooks) == 1 and len(m._forward_pre_hooks) == 1))
        for _, m in walk(module)
    )


def find_chunks(modules: dict[str, nn.Module], path: str, num_calls: int) -> tuple[int, int] | None:
    """Returns how many calls the plan in place makes one region, and how many calls are in such regions.

    (1, 0) without a plan for the module; None if its plan tells single calls apart, or has it in a larger region.
    """
    chunked: list[Any] = []
    for name, module in modules.items():
        patched = find_patch(module)
        decisions = getattr(patched.settings, "decisions", ()) if patched is not None else ()
        if patched is None or (not decisions and not getattr(patched.settings, "joins", ())):
            continue
        if name == path:
            chunked = [d for d in decisions if d.chunk is not None]
        is_around = not name or path.startswith(f"{name}.")
        if is_around and name != path and any(d.action in ("recompute", "tile") for d in decisions):
            return None
        is_inside = name == path or name.startswith(f"{path}.")
        if is_inside and (patched.settings.joins or any(d.call is not None or d.span for d in decisions)):
            return None
    if not chunked:
        return 1, 0
    if len(chunked) > 1:
        return None
    return chunked[0].chunk, num_calls if chunked[0].calls is None else min(chunked[0].calls, num_calls)


def find_zones(num_calls: int, chunk: int, chunked_calls: int) -> list[Zone]:
    """Returns the parts of a loop in which calls are folded."""
    zones = []
    for start, stop, period in ((0, chunked_calls, chunk), (chunked_calls, num_calls, 1)):
        first, last = (_FIRST_STEPS, _LAST_STEPS) if period == 1 else (_FIRST_CHUNKS, _LAST_CHUNKS)
        units = (stop - start) // period
        if period > 1 and (stop - start) % period:
            last -= 1
        low, high = start + first * period, start + (units - last) * period
        if high - low >= max(_FEWEST_FOLDED, period):
            zones.append(Zone(start, stop, period, low, high))
    return zones


def _traits(tensor: torch.Tensor) -> tuple[Any, ...]:
    traits = _compat.fake_traits(tensor)
    if traits is None:
        if _compat.is_fake(tensor):
            raise _Unlike
        values: Any = id(tensor)
        if tensor.numel() <= _LOOKED_AT:
            with _compat.without_dispatch_modes():
                values = tuple(tensor.detach().flatten().tolist())
        return (tensor.shape, tensor.stride(), tensor.dtype, "real", tensor.requires_grad, values)
    return (*traits, tensor.grad_fn is None)


def _describe(value: Any, tensors: list[torch.Tensor], seen: dict[int, int], depth: int = 0) -> Any:
    """Returns what a value is, with each distinct tensor as its number; the tensors are added to the list."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return kind, value if kind is not slice else (value.start, value.stop, value.step)
    if isinstance(value, torch.Tensor):
        number = seen.get(id(value))
        if number is None:
            number = seen[id(value)] = len(tensors)
            tensors.append(value)
        return "tensor", number
    if isinstance(value, (list, tuple)):
        return kind, tuple(_describe(item, tensors, seen, depth) for item in value)
    if isinstance(value, dict):
        return kind, tuple((key, _describe(item, tensors, seen, depth)) for key, item in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [getattr(value, f.name, None) for f in dataclasses.fields(value)]
        return kind, tuple(_describe(item, tensors, seen, depth) for item in fields)
    if isinstance(value, (nn.Module, type)) or callable(value) or depth >= _DEPTH or not hasattr(value, "__dict__"):
        return kind, id(value)
    inside = tuple((k, _describe(v, tensors, seen, depth + 1)) for k, v in vars(value).items())
    return kind, id(value), inside


def _skeleton(value: Any, seen: dict[int, int]) -> Any:
    """Returns a nest with `_Slot`s where it has tensors."""
    if isinstance(value, torch.Tensor):
        return _Slot(seen[id(value)])
    return _map(lambda item: _skeleton(item, seen), value)


def _fill(skeleton: Any, results: list[torch.Tensor]) -> Any:
    if isinstance(skeleton, _Slot):
        return results[skeleton.index]
    return _map(lambda item: _fill(item, results), skeleton)


def _map(function: Callable[[Any], Any], nest: Any) -> Any:
    if isinstance(nest, (list, tuple)):
        items = [function(item) for item in nest]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    if isinstance(nest, dict):
        mapped = {key: function(item) for key, item in nest.items()}
        return mapped if type(nest) is dict else type(nest)(mapped)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return dataclasses.replace(nest, **{f.name: function(getattr(nest, f.name)) for f in dataclasses.fields(nest)})
    return nest


def _flows(
    inputs: list[torch.Tensor], varying: list[torch.Tensor], results: list[torch.Tensor], first_node: int
) -> tuple[int, ...]:
    """Returns which of the `varying` inputs the results' gradients flow to, through nodes made since `first_node`.

    What is handed to every call alike gets its gradients from the calls that are run.
    """
    kinds = {id(t) for t in varying}
    wanted: dict[tuple[int, int], int] = {}
    held = []
    for i, tensor in enumerate(inputs):
        if id(tensor) in kinds and tensor.requires_grad and tensor.grad_fn is not None:
            held.append(tensor.grad_fn)
            wanted[id(tensor.grad_fn), tensor.output_nr] = i
    found: set[int] = set()
    stack = [t.grad_fn for t in results if t.grad_fn is not None]
    visited: set[int] = set()
    while stack:
        node = stack.pop()
        if id(node) in visited:
            continue
        visited.add(id(node))
        held.append(node)
        for following, number in node.next_functions:
            if following is None:
                continue
            held.append(following)
            if (id(following), number) in wanted:
                found.add(wanted[id(following), number])
            if first_node <= _compat.node_number(following) < 2**63:
                stack.append(following)
    return tuple(sorted(found))
