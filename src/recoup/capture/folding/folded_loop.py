"""A module that is called many times: its first and last calls are run, those between are stood for."""

from __future__ import annotations

import dataclasses
import operator
import random
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recoup import _torch
from recoup.capture.folding.surface import (
    PLAIN_TYPES,
    Lineage,
    Result,
    Surface,
    Unlike,
    describe,
    edge_of,
    fill,
    flows_of,
    skeleton_of,
    traits_of,
    values_of,
)
from recoup.capture.folding.zones import FIRST_STEPS, Irregular, Zone
from recoup.runtime.rebuild.lineage import Value, current_recorder
from recoup.runtime.rebuild.saved_tensor import Kept
from recoup.runtime.recompute import region as regions
from recoup.runtime.recompute.module_state import walk

if TYPE_CHECKING:
    from recoup.capture.folding.fold import Folding

_NOT_PLAIN = object()
_SKIPPED = (frozenset(nn.Module().__dict__) | {"forward"}) - {"training"}


@dataclasses.dataclass(slots=True)
class Block:
    """What a call of a loop is in the recording: ranges of ops, storages and the like, [first, last).

    Attributes:
        folded: its ops are not there: one mark stands for them.
        calls: of the recorder, itself and those inside. rederived: how many saved tensors it rederives.
        slots: of a folded call: storages that stand for results, {storage: result}; in backward {storage: input}.
        inputs: storages of the tensors it is handed and finds; in backward, of gradients. given: which results got one.
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
class _Entry:
    """What a call finds: a description of all but the tensors' identity, the values of real tensors, the tensors."""

    description: Any
    values: Any
    tensors: list[torch.Tensor]
    state: list[tuple[dict[str, Any], str, Any]]

    def let_go(self) -> None:
        """Forgets the tensors."""
        self.tensors, self.state = [], []


@dataclasses.dataclass(slots=True)
class _Before:
    """What a call found, kept without its tensors.

    Attributes:
        tensors: weak references. edges: see `edge_of`. gradients: how to make one of each that may get one.
        state: (table, name, the tensor or the object's identity, whether it holds tensors) of attributes.
        values, kept, turn: what the recorder of a rederive plan knew. num_calls: counted by the plan in place.
        chance: random numbers outside of torch. num_looks: see `Tracker`.
    """

    tensors: list[weakref.ref[torch.Tensor]]
    edges: list[tuple[int, int] | None]
    gradients: list[_torch.FakeTemplate | None]
    state: list[tuple[dict[str, Any], str, Any, bool]]
    values: list[Value]
    kept: list[bool]
    turn: int
    num_calls: dict[str, int]
    chance: Any
    num_looks: int


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor) or type(value) in PLAIN_TYPES:
        return False
    found: list[torch.Tensor] = []
    describe(value, found, {})
    return bool(found)


def _chance() -> Any:
    """Returns the state of Python's and numpy's random numbers."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), None if state is None else (state[1].tobytes(), state[2])


class Bridge(torch.autograd.Function):
    """The one node of a folded call: marks where its forward and its backward are, computes nothing."""

    @staticmethod
    def forward(ctx: Any, loop: Loop, surface: Surface, index: int, anchor: Any, *inputs: torch.Tensor) -> Any:
        """Returns the results that require gradients; `anchor` makes them do so."""
        ctx.loop, ctx.surface, ctx.index, ctx.block = loop, surface, index, None
        ctx.set_materialize_grads(False)
        made = loop.mark_forward(surface, index)
        ctx.held = loop.holding = []  # filled when all results are there
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Returns gradients of the inputs, and nothing for the rest."""
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
        self._last_state: list[Any] = []
        self._plain: Any = ()
        self._rest: list[int] = []
        self._seen: list[weakref.ref[torch.Tensor]] = []
        self._parent: int | None = None

    def zone(self, index: int) -> Zone | None:
        """Returns the zone whose folded calls the given one is among, None if it is run."""
        if self.counts:
            begin = self._first + FIRST_STEPS
            return Zone(self._first, 1 << 62, 1, begin, 1 << 62) if index >= begin else None
        if self.num_calls is not None and index >= self.num_calls:  # there are more than there were thought to be
            self.counts, self._first = True, self.zones[0].low - FIRST_STEPS
            return self.zone(index)
        return next((z for z in self.zones if z.low <= index < z.high), None)

    def run(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the next call, or stands for it."""
        try:
            return self._run(original, args, kwargs)
        except Unlike:
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
        if surface is None or not surface.fits(entry.description, entry.values):
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
        held = [value if type(value) in PLAIN_TYPES else _NOT_PLAIN for _, _, value in state]
        if len(held) != len(self._last_state) or not all(map(operator.is_, held, self._last_state)):
            self._last_state = held
            self._plain = tuple((id(t), name, v if type(v) in PLAIN_TYPES else None) for t, name, v in state)
            self._rest = [i for i, v in enumerate(held) if v is _NOT_PLAIN]
        shape = (
            describe((args, kwargs), tensors, seen),
            self._plain,
            tuple([describe(state[i][2], tensors, seen) for i in self._rest]),
        )
        storages: dict[int, int] = {}
        traits = []
        before = [ref() for ref in self._seen]
        for i, tensor in enumerate(tensors):
            is_static = i < len(before) and before[i] is tensor
            traits.append(
                (traits_of(tensor), is_static, storages.setdefault(tensor.untyped_storage()._cdata, len(storages)))
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
        values = tuple(values_of(t) for t in tensors if not _torch.is_fake(t))
        return _Entry((shape, tuple(traits), about), values, tensors, state)

    def _state(self) -> list[tuple[dict[str, Any], str, Any]]:
        found = []
        for module in self._modules:
            attributes, buffers = module.__dict__, module._buffers
            found += [(attributes, name, value) for name, value in attributes.items() if name not in _SKIPPED]
            if buffers:
                found += [(buffers, name, value) for name, value in buffers.items()]
        return found

    # -- calls that are run -------------------------------------------------------------------------------------

    def _execute(self, index: int, entry: _Entry, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tracker, recorder = self._folding.tracker, self._folding.recorder
        before = self._note(entry) if self._is_model(index) else None
        inputs = self._find(entry.tensors)
        entry.let_go()  # nothing may live longer because it is looked at
        node = _torch.next_node_number()
        ops, saves, links, rederived = (
            len(tracker.ops),
            len(tracker.saves),
            len(tracker.rederive_links),
            tracker.num_rederived,
        )
        call, first_storage = tracker.call, len(tracker.storages)
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
            inputs=inputs,
        )
        if before is not None:
            surface = self.surfaces[index] = self._surface(entry, before, output, node, first_storage, block)
            last = self.surfaces.get(index - self._period(index))
            is_first = self.counts or any(z.start + z.period <= index - z.period < z.low for z in self.zones)
            if is_first and last is not None and last.looks() != surface.looks():
                raise Irregular(self.path, f"call {index} does something else than the one before")
        return output

    def _note(self, entry: _Entry) -> _Before:
        """Returns what is to be compared after the call, without holding a tensor."""
        recorder = current_recorder()
        is_static = [static for _, static, _ in entry.description[1]]
        return _Before(
            tensors=[weakref.ref(t) for t in entry.tensors],
            edges=[edge_of(t) for t in entry.tensors],
            gradients=[
                None if edge_of(t) is None or static else _torch.FakeTemplate(self._like(t))
                for t, static in zip(entry.tensors, is_static, strict=True)
            ],
            state=[
                (table, name, weakref.ref(v) if isinstance(v, torch.Tensor) else id(v), _holds_tensors(v))
                for table, name, v in entry.state
            ],
            values=[] if recorder is None else [recorder.value_of(t) for t in entry.tensors],
            kept=self._kept([] if recorder is None else [recorder.value_of(t) for t in entry.tensors]),
            turn=0 if recorder is None else recorder.turn,
            num_calls=self._num_calls(),
            chance=_chance(),
            num_looks=self._folding.tracker.num_looks,
        )

    def _is_model(self, index: int) -> bool:
        """Whether the call is one that folded ones are compared with."""
        if self.counts:
            return self._first + FIRST_STEPS - 2 <= index
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
        self, entry: _Entry, before: _Before, output: Any, node: int, first_storage: int, block: Block
    ) -> Surface:
        """Returns what was seen of a call that ran.

        Raises:
            Irregular: if no other call could be stood for by it.
        """
        if before.chance != _chance():
            raise Irregular(self.path, "it draws random numbers outside of torch")
        inputs = [ref() for ref in before.tensors]
        if any(t is not None and edge_of(t) != edge for t, edge in zip(inputs, before.edges, strict=True)):
            raise Irregular(self.path, "it changes a tensor in place that needs gradients")
        results: list[torch.Tensor] = []
        seen: dict[int, int] = {}
        shape = describe(output, results, seen)
        changed = self._changed(before)
        shapes = [describe(value, results, seen) for _, _, value in changed]
        sources = {id(t): i for i, t in enumerate(inputs) if t is not None}
        made_results = self._results(results, sources, first_storage)
        self._note_gradients(results, made_results, block)
        flows = flows_of(
            [edge if g is not None else None for edge, g in zip(before.edges, before.gradients, strict=True)],
            [t for t in results if id(t) not in sources],
            node,
        )
        after = self._num_calls()
        return Surface(
            description=entry.description,
            values=entry.values,
            results=made_results,
            output=skeleton_of(output, seen),
            changes=[(table, name, skeleton_of(value, seen)) for table, name, value in changed],
            flows=flows,
            gradients=[g for i in flows if (g := before.gradients[i]) is not None],
            num_calls={p: n - before.num_calls.get(p, 0) for p, n in after.items() if n != before.num_calls.get(p, 0)},
            shapes=(shape, shapes),
            held=self._held(results, made_results, block),
            lineage=self._lineage(before, results, made_results),
            looks_at_values=self._folding.tracker.num_looks != before.num_looks,
        )

    def _changed(self, before: _Before) -> list[tuple[dict[str, Any], str, Any]]:
        """Returns the attributes that the call has bound anew; nests of tensors count as bound anew."""
        after = self._state()
        if [(id(table), name) for table, name, _ in after] != [(id(t), name) for t, name, _, _ in before.state]:
            raise Irregular(self.path, "its modules gain or lose attributes")
        found = []
        for (table, name, value), (_, _, old, held_tensors) in zip(after, before.state, strict=True):
            is_old = old() is value if isinstance(old, weakref.ref) else old == id(value)
            if not is_old or held_tensors or _holds_tensors(value):
                found.append((table, name, value))
        return found

    def _results(self, tensors: list[torch.Tensor], sources: dict[int, int], first_storage: int) -> list[Result]:
        made: list[Result] = []
        storages: set[int] = set()
        for tensor in tensors:
            source = sources.get(id(tensor), -1)
            traits = traits_of(tensor)
            if source >= 0:
                made.append(Result(traits, source, -1, None))
                continue
            found = self._folding.tracker.find(tensor)
            if not _torch.is_fake(tensor):
                raise Irregular(self.path, "a result is no fake tensor")
            whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
            if found is None or found < first_storage or found in storages or tensor.storage_offset() or not whole:
                raise Irregular(self.path, "a result shares memory with something else")
            storages.add(found)
            made.append(Result(traits, -1, found - first_storage, _torch.FakeTemplate(tensor)))
        return made

    def _note_gradients(self, tensors: list[torch.Tensor], results: list[Result], block: Block) -> None:
        """Has the block told which of its results get a gradient."""
        given = [False] * len(results)
        block.given = ()

        def note(i: int) -> Callable[[torch.Tensor], None]:
            def hook(gradient: torch.Tensor) -> None:
                given[i] = True
                block.given = tuple(given)

            return hook

        for i, tensor in enumerate(tensors):
            if tensor.requires_grad and results[i].source < 0:
                tensor.register_hook(note(i))  # type: ignore[no-untyped-call]

    def _held(
        self, tensors: list[torch.Tensor], results: list[Result], block: Block
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns which inputs and results autograd keeps for the call."""
        tracker = self._folding.tracker
        saved = {storage for _, _, storage, _ in tracker.saves[slice(*block.saves)]}
        return (
            tuple(i for i, storage in enumerate(block.inputs) if storage in saved),
            tuple(i for i, t in enumerate(tensors) if results[i].source < 0 and tracker.find(t) in saved),
        )

    def _kept(self, values: list[Value]) -> list[bool]:
        with self._folding.compared():
            return [v.kept is not None and v.alive() is not None for v in values]

    def _lineage(self, before: _Before, tensors: list[torch.Tensor], results: list[Result]) -> Lineage:
        recorder = current_recorder()
        if recorder is None:
            return Lineage()
        values = [recorder.value_of(t) for t in tensors]
        kept = self._kept(values)
        made = [v.made is not None or v.random_mask or type(v) is _Unknown for v in values]
        fresh = [i for i, r in enumerate(results) if r.source < 0]
        inputs_kept = zip(before.kept, self._kept(before.values), strict=True)
        return Lineage(
            turns=recorder.turn - before.turn,
            inputs=tuple(i for i, (old, new) in enumerate(inputs_kept) if new and not old),
            results=tuple(i for i in fresh if kept[i]),
            derived=tuple(i for i in fresh if not kept[i] and made[i]),
        )

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
            linked_results = Bridge.apply(self, surface, index, folding.anchor, *inputs)  # type: ignore[no-untyped-call]
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
            table[name] = fill(skeleton, results)
        return fill(surface.output, results)

    def _stand_in_lineage(self, lineage: Lineage, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
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

    def _make(self, result: Result, block: Block, i: int) -> torch.Tensor:
        assert result.template is not None
        made = result.template.new(self._folding.tracker.fake_mode)
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
            gradient = template.new(tracker.fake_mode)
            block.slots[tracker.add(gradient, "temporary", "")] = i
            made.append(gradient)
        return made
