"""A module that is called many times: its first and last calls are run, those between are replaced by marks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recoup import _torch
from recoup.capture.folding.entry import Entry, Finder
from recoup.capture.folding.observed import Block, Observer, Unknown
from recoup.capture.folding.surface import (
    Lineage,
    Result,
    Surface,
    Unlike,
    fill,
)
from recoup.capture.folding.zones import RUN_STEPS, Irregular, Zone
from recoup.runtime.rebuild.kept import Kept
from recoup.runtime.rebuild.lineage import current_recorder
from recoup.runtime.recompute.scope import inside_region

if TYPE_CHECKING:
    from recoup.capture.folding.fold import Folding


class Bridge(torch.autograd.Function):
    """The autograd node of a folded call: leaves the marks of its forward and backward, computes nothing."""

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
        counts: whether this run only counts its calls, because their number is not known yet.
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
        self._finder = Finder(module)
        self._observer = Observer(folding, path, self._finder)
        self._parent: int | None = None

    def zone(self, index: int) -> Zone | None:
        """Returns the zone in which the given call is folded, None if the call is run."""
        if self.counts:
            begin = self._first + RUN_STEPS
            return Zone(self._first, 1 << 62, 1, begin, 1 << 62) if index >= begin else None
        if self.num_calls is not None and index >= self.num_calls:  # there are more than there were thought to be
            self.counts, self._first = True, self.zones[0].low - RUN_STEPS
            return self.zone(index)
        return next((z for z in self.zones if z.low <= index < z.high), None)

    def run(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs or folds the next call; returns its results."""
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
        if self._parent not in (None, parent) or inside_region():
            raise Irregular(self.path, "it is called by several calls")
        self._parent = parent
        index, self.index = self.index, self.index + 1
        entry = self._finder.enter(args, kwargs)
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

    # -- calls that are run -------------------------------------------------------------------------------------

    def _execute(self, index: int, entry: Entry, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tracker, recorder = self._folding.tracker, self._folding.recorder
        before = self._observer.note(entry) if self._is_model(index) else None
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
            surface = self.surfaces[index] = self._observer.surface(entry, before, output, node, first_storage, block)
            last = self.surfaces.get(index - self._period(index))
            is_first = self.counts or any(z.start + z.period <= index - z.period < z.low for z in self.zones)
            if is_first and last is not None and last.looks() != surface.looks():
                raise Irregular(self.path, f"call {index} does something else than the one before")
        return output

    def _find(self, tensors: list[torch.Tensor]) -> tuple[int, ...]:
        found = map(self._folding.tracker.find, tensors)
        return tuple(-1 if i is None else i for i in found)

    def _is_model(self, index: int) -> bool:
        """Whether the call is one of those whose ops folded calls are given."""
        if self.counts:
            return self._first + RUN_STEPS - 2 <= index
        return any(z.low - 2 * z.period <= index < z.low or z.high <= index < z.high + 2 * z.period for z in self.zones)

    def _period(self, index: int) -> int:
        return next((z.period for z in self.zones if z.start <= index < z.stop), 1)

    # -- calls that are left out --------------------------------------------------------------------------------

    def _stand_in(self, surface: Surface, index: int, entry: Entry) -> Any:
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
        """Gives the recorder of a rederive plan the values that it would have after the call."""
        recorder = current_recorder()
        if recorder is None:
            return
        recorder.turn += lineage.turns
        for i in lineage.derived:
            value = Unknown()
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
        """Leaves the mark of a folded call's backward; returns fake gradients of the call's inputs."""
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
