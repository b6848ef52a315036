"""Observes the calls of a loop that are executed, so that later calls can be replaced by marks."""

from __future__ import annotations

import dataclasses
import random
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from recoup import _torch
from recoup.capture.folding.entry import Entry, Finder
from recoup.capture.folding.surface import (
    PLAIN_TYPES,
    Lineage,
    Result,
    Surface,
    describe,
    edge_of,
    flows_of,
    skeleton_of,
    traits_of,
)
from recoup.capture.folding.zones import Irregular
from recoup.runtime.rebuild.lineage import current_recorder
from recoup.runtime.rebuild.values import Value

if TYPE_CHECKING:
    from recoup.capture.folding.fold import Folding


@dataclasses.dataclass(slots=True)
class Block:
    """A call of a loop in the recording: its ranges of ops, saves, links and calls, [first, last).

    Attributes:
        folded: the call was not run, one mark stands for its ops.
        calls: range of the recorder's calls: itself and those inside.
        rederived: number of saved tensors that it rederives.
        slots: of a folded call: index of the result by the storage that stands for it; in backward, of the input.
        inputs: storages of its arguments and of the state it reads; in backward, of the gradients it gets.
        given: indices of the results that got a gradient.
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


class Unknown(Value):
    """The value of a folded call's result: its lineage is unknown, and asking for it aborts folding."""

    __slots__ = ("folding",)
    folding: Folding

    def alive(self) -> Any | None:
        """Returns the object that keeps it; aborts folding unless calls are being compared."""
        found = super().alive()
        if found is None and not self.folding.comparing:
            self.folding.failed = "a tensor might be rebuilt from what a folded call made"
        return found


@dataclasses.dataclass(slots=True)
class Before:
    """State before a call, kept without its tensors.

    Attributes:
        tensors: weak references.
        edges: see `edge_of`.
        gradients: a factory of a like tensor for each input that may get a gradient.
        state: (table, name, the tensor or the object's identity, whether it holds tensors) of attributes.
        values, kept, turn: state of the recorder of a rederive plan.
        num_calls: calls counted by the applied plan, by path.
        chance: state of Python's and numpy's random number generators.
        num_looks: see `Tracker`.
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


class Observer:
    """Notes what the calls of one loop do."""

    def __init__(self, folding: Folding, path: str, finder: Finder) -> None:
        self.path = path
        self._folding = folding
        self._finder = finder

    def note(self, entry: Entry) -> Before:
        """Returns the state to be compared after the call, without holding a tensor."""
        recorder = current_recorder()
        is_static = [static for _, static, _ in entry.description[1]]
        return Before(
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

    def surface(
        self, entry: Entry, before: Before, output: Any, node: int, first_storage: int, block: Block
    ) -> Surface:
        """Returns the surface of a call that ran.

        Raises:
            Irregular: if no other call can be replaced by it.
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

    def _changed(self, before: Before) -> list[tuple[dict[str, Any], str, Any]]:
        """Returns the attributes that the call has rebound; containers of tensors count as rebound."""
        after = self._finder.state()
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
        """Registers hooks that note in the block which of its results get a gradient."""
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

    def _lineage(self, before: Before, tensors: list[torch.Tensor], results: list[Result]) -> Lineage:
        recorder = current_recorder()
        if recorder is None:
            return Lineage()
        values = [recorder.value_of(t) for t in tensors]
        kept = self._kept(values)
        made = [v.made is not None or v.random_mask or type(v) is Unknown for v in values]
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

    def _num_calls(self) -> dict[str, int]:
        """Returns how often the plan in place has counted each path so far."""
        counted = self._folding.counted
        return dict(counted) if counted is not None else {}
