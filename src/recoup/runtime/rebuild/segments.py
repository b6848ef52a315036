"""Rebuilding by tensor: saved tensors of a segment of the forward are rebuilt together from the results that are held.

[Note: segments]
1. The forward's ops are recorded (`lineage.py`), matmuls and convolutions too: every op that reads tensors and returns
   new ones. A segment is an interval of them.
2. A saved tensor whose history leads to held results is not kept: autograd gets a `Rebuilt`, which has its sources.
   A source goes with the last `Rebuilt` that needs it: what else autograd saved of the segment may wait without it.
   What no history leads to (random numbers, opaque kernels, inputs) is held.
3. The first `Rebuilt` of a segment that backward unpacks has all of its segment's rebuilt: each op that is needed runs
   once, in forward order; an intermediate is let go after its last reader, a result after the last who waits for it.
   In a second backward over a retained graph all wait again, those too that it does not come by.
4. A segment may be rebuilt in *pieces*: its first rebuild ends with what they start from, and each piece is rebuilt
   from that when backward gets there. A piece is a segment whose `around` is the one it is a piece of.
5. Nothing of the user's Python runs twice: the very overloads run on the very arguments, below autocast and autograd.

The scheme is that of activation checkpointing (Chen et al., arXiv 1604.06174) with tensors in the place of modules.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from recoup import _torch
from recoup.runtime import execution_context
from recoup.runtime.rebuild.kept import Kept, Source, changed_since, is_overwritten, laid
from recoup.runtime.rebuild.rederived import rerunning
from recoup.runtime.rebuild.rerun import has_memory, run_again
from recoup.runtime.rebuild.surroundings import Surroundings
from recoup.runtime.rebuild.values import Geometry, Value

_backward_id = _torch.current_backward_id  # asked for every rebuilt tensor


class Wanted:
    """A handle on a value of a segment: holds its contents from the segment's rebuild until it is taken.

    Attributes:
        sources: what keeps the held results that it is rebuilt from.
        taken_in: the backward in which it was taken last, None if it was not. In another one it waits again.
    """

    __slots__ = ("__weakref__", "held", "segment", "sources", "taken_in", "value")

    def __init__(self, value: Value, segment: Segment, sources: list[Any]) -> None:
        self.value = value
        self.segment = segment
        self.sources = sources
        self.held: torch.Tensor | None = None
        self.taken_in: int | None = None
        segment.pending.append(weakref.ref(self))

    def move(self, segment: Segment) -> None:
        """Has another segment rebuild it from now on, if it is there when that begins."""
        sources = segment.reach(self.value) if segment.begins_with(self.value) else None
        if sources is not None:
            self.segment, self.sources = segment, sources
            segment.pending.append(weakref.ref(self))

    def is_lost(self) -> bool:
        """Whether nobody may ask for it any more."""
        return False

    def take(self) -> torch.Tensor:
        """Returns the contents and drops them here; rebuilds the segment if they are not there yet."""
        if self.held is None:
            self.segment.rebuild(self)
        found, self.held = self.held, None
        self.taken_in = _backward_id()
        assert found is not None
        return found


class Segment:
    """An interval of the forward's ops.

    Attributes:
        around: the segment that this one is a piece of.
        pending: handles, those not taken yet among them: `Rebuilt`s that backward will unpack, and those of pieces
            that start from it.
        joints: values that stay for its pieces once it was rebuilt. starts: those of `around` that a piece is rebuilt
            from.
    """

    __slots__ = ("__weakref__", "_counts", "_led", "around", "joints", "pending", "starts")

    def __init__(self, around: Segment | None = None) -> None:
        self._counts = execution_context.current_counts()
        self.around = around
        self.pending: list[weakref.ref[Wanted]] = []
        self.joints: set[Value] = set()
        self.starts: dict[Value, Wanted] = {}
        self._led: dict[Value, tuple[Value, ...]] = {}  # to each value met: the held ones

    def begins_with(self, value: Value) -> bool:
        """Whether a value is there before any op of the segment runs again."""
        return value.alive() is not None or (self.around is not None and value in self.around.joints)

    def forget(self, value: Value) -> None:
        """Has the piece not start from a value that nothing of it needs any more."""
        del self.starts[value], self._led[value]

    def reach(self, value: Value) -> list[Source] | None:
        """Returns the sources that a value is rebuilt from; None: it cannot be."""
        held = self._held_below(value)
        if held is None:
            return None
        sources = [kept for kept in [v.alive() for v in held] if kept is not None]
        if len(sources) < len(held):  # one went with the graph it was in
            self._led.clear()
            return self.reach(value)
        for source, start in zip(sources, held, strict=True):
            if isinstance(source, Kept):
                source.is_source = True
                if start.is_passing:
                    source.part()
        return sources

    def held_below(self, value: Value) -> dict[Value, type]:
        """Returns the held values that lead to a value, each with the class of what keeps it."""
        return {held: type(held.alive()) for held in self._held_below(value) or ()}

    def _held_below(self, value: Value) -> tuple[Value, ...] | None:
        """Returns the held values that lead to a value; walks the record back, less what was walked before."""
        led = self._led
        stack = [value]
        while stack:
            current = stack[-1]
            if current in led:
                stack.pop()
                continue
            if current.constant is not None:
                constant, parameter = current.constant, current.constant.tensor
                if constant.copy is None and (parameter._version != constant.version or not has_memory(parameter)):
                    return None
                constant.is_source = True
                led[current] = ()
                continue
            if current.kept is not None and current.alive() is not None:
                led[current] = (current,)
                continue
            made = current.made
            if made is None:
                return None
            if self.around is not None and current in self.around.joints:
                further = self.around.reach(current)
                if further is None:
                    return None
                self.starts[current] = Wanted(current, self.around, further)
                led[current] = ()
                continue
            ahead = [v for v in made.values if v not in led]
            if ahead:
                stack += ahead
                continue
            below = {led[v] for v in made.values}
            led[current] = below.pop() if len(below) == 1 else tuple(dict.fromkeys(v for held in below for v in held))
        return led[value]

    def rebuild(self, asked: Wanted) -> None:
        """Has everybody who waits hold the contents asked for, by running what leads to them."""
        now = _backward_id()
        waiting = [asked]
        for ref in self.pending:
            wanted = ref()
            if wanted is None or wanted is asked or wanted.taken_in == now or wanted.segment is not self:
                continue
            if not wanted.is_lost():
                waiting.append(wanted)
        with rerunning():
            here = self._started()
            here.update((w.value, w.held) for w in waiting if w.held is not None)
            found = run_again(_geometries([w for w in waiting if w.held is None]), here)
        num = 0
        for wanted in waiting:
            if wanted.held is None:
                wanted.held = found[wanted.value]
                num += type(wanted) is Rebuilt
        if num:
            execution_context.count("num_rederived", self._counts, num)

    def _started(self) -> dict[Value, torch.Tensor]:
        """Returns what a piece starts from, rebuilding the segment around it if that is not there.

        From here on nobody else holds it: each goes after its last reader. A second backward asks again.
        """
        return {value: wanted.take() for value, wanted in self.starts.items()}


def _geometries(waiting: list[Wanted]) -> dict[Value, list[Geometry]]:
    """Returns what is wanted of each value: what a piece starts from, whole."""
    wanted: dict[Value, list[Geometry]] = {}
    for one in waiting:
        geometry = one.geometry if isinstance(one, Rebuilt) else one.value.base
        wanted.setdefault(one.value, []).extend(() if geometry is None else (geometry,))
    return wanted


class Rebuilt(Wanted):
    """What autograd gets instead of a saved tensor: a value of a segment and the geometry it is wanted in."""

    __slots__ = ("_under", "geometry")

    def __init__(
        self,
        value: Value,
        geometry: Geometry,
        segment: Segment,
        sources: list[Any],
        under: Surroundings,
    ) -> None:
        self.value = value  # as `Wanted` does it, in one call: there are thousands in a step
        self.segment = segment
        self.sources = sources
        self.held = None
        self.taken_in = None
        segment.pending.append(weakref.ref(self))
        self._under = under
        self.geometry = geometry

    def is_lost(self) -> bool:
        """Whether what autograd saved was overwritten since: another part of the storage may have been."""
        return is_overwritten(self.value, self.geometry)

    def unpack(self) -> torch.Tensor:
        """Returns the tensor; raises if it was changed in place since it was saved, as autograd would.

        Under `retain_graph` it may be asked for again, and is rebuilt again, with all others that may be.
        """
        value, tensor = self.value, self.held
        if value.overwritten and self.is_lost():
            size, _, _, dtype = self.geometry
            raise changed_since(f"{dtype} {list(size)}")
        if tensor is not None:
            self.held = None
            self.taken_in = _backward_id()
        elif self._under.are_here():
            tensor = self.take()
        else:
            with self._under.again():
                tensor = self.take()
        return tensor if self.geometry is value.base else laid(tensor, self.geometry)
