"""A segment of a step that follows a program: what is held for it, and who waits for its rebuild."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch

from recoup import _torch
from recoup.runtime import execution_context
from recoup.runtime.rebuild.constant import Constant
from recoup.runtime.rebuild.dynamic_shapes import Varied
from recoup.runtime.rebuild.kept import Kept, KeptCompact, laid
from recoup.runtime.rebuild.rederived import rerunning
from recoup.runtime.rebuild.rerun import parameter_of
from recoup.runtime.rebuild.segment_program import Lead, SegmentProgram, Wish
from recoup.runtime.rebuild.surroundings import Surroundings

_backward_id = _torch.current_backward_id  # asked for at every rebuild


class Sources(list[Any]):
    """What keeps the held values of a `Lead`: the list of the one below, and its own. It can be referred to weakly.

    Attributes:
        run: the segment that is rebuilt from them.
    """

    __slots__ = ("__weakref__", "run")

    def __init__(self, run: SegmentRun) -> None:
        self.run = run


Lists = dict[Lead, weakref.ref[Sources]]  # of a step; whoever is rebuilt from them has the list


class Waiting:
    """What autograd gets instead of a saved tensor in a step that follows a program; also what a piece starts from.

    Attributes:
        wish: what is asked for. sources: what keeps the held results that it is rebuilt from.
        held: the contents, from the segment's rebuild until they are taken; in another backward it waits again.
    """

    __slots__ = ("__weakref__", "held", "sources", "wish")

    def __init__(self, wish: Wish, sources: Sources) -> None:
        self.wish = wish
        self.sources = sources
        self.held: torch.Tensor | None = None
        sources.run.pending.append(weakref.ref(self))

    def take(self) -> torch.Tensor:
        """Returns the whole contents and drops them here; rebuilds the segment if they are not there yet."""
        if self.held is None:
            self.sources.run.rebuild(self)
        found, self.held = self.held, None
        assert found is not None
        return found

    def unpack(self) -> torch.Tensor:
        """Returns the tensor. Under `retain_graph` it may be asked for again, and is rebuilt again."""
        if self.held is None:
            run = self.sources.run
            with contextlib.nullcontext() if run.under.are_here() else run.under.again():
                run.rebuild(self)
        tensor, self.held = self.held, None
        assert tensor is not None
        wish = self.wish
        if wish.view is None:
            return tensor
        if tensor.dtype is wish.geometry[3]:  # type: ignore[index]
            return tensor.as_strided(*wish.view)
        return laid(tensor, wish.geometry)  # type: ignore[arg-type]


class SegmentRun:
    """A segment of a step that follows a program, in the place of a recorded step's `Segment`.

    Attributes:
        pending: whoever waits for a value of it. under: what its ops ran under.

    Args:
        lists: of all of the step's segments. around: the run of the segment that this is a piece of. starts: wishes for
            what it starts from. noted: see `StepRun`.
    """

    __slots__ = (
        "__weakref__",
        "_around",
        "_constants",
        "_counts",
        "_late",
        "_lists",
        "_noted",
        "_program",
        "_rebuilt_in",
        "_sources",
        "_starts",
        "pending",
        "under",
    )

    def __init__(
        self,
        program: SegmentProgram,
        constants: dict[int, Constant],
        lists: Lists,
        around: SegmentRun | None,
        starts: list[Wish],
        under: Surroundings,
        noted: dict[int, Any],
    ) -> None:
        self._counts = execution_context.current_counts()
        self._program = program
        self._constants = constants
        self.pending: list[weakref.ref[Waiting]] = []
        self.under = under
        self._rebuilt_in: int | None = None  # which backward
        self._sources: dict[int, weakref.ref[Kept | KeptCompact]] = {}
        self._late: dict[int, list[weakref.ref[Sources]]] = {}
        self._lists = lists
        self._noted = noted
        self._starts: dict[int, Waiting] = {}
        self._around = around
        if around is not None:
            self._starts = {wish.number: Waiting(wish, around.holding(wish.lead)) for wish in starts}

    def holding(self, lead: Lead) -> Sources:
        """Returns what keeps the held values of a lead; those that are kept later join the list then."""
        found: Sources | None = None
        new: list[Lead] = []
        below: Lead | None = lead
        while below is not None and ((ref := self._lists.get(below)) is None or (found := ref()) is None):
            new.append(below)
            below = below.below
        for each in reversed(new):
            found = self._list(each, found)
        assert found is not None
        return found

    def _list(self, lead: Lead, below: Sources | None) -> Sources:
        found = Sources(self)
        self._lists[lead] = weakref.ref(found)
        if below is not None:
            found.append(below)
        for source in lead.more:
            kept = self._kept(source)
            if kept is None:
                self._late.setdefault(source, []).append(self._lists[lead])
            else:
                found.append(kept)
        return found

    def keep(self, number: int, kept: Kept | KeptCompact) -> None:
        """Notes what keeps a held value that something is rebuilt from."""
        kept.is_source = True
        self._sources[number] = weakref.ref(kept)
        for ref in self._late.pop(number, ()):
            sources = ref()
            if sources is not None:
                sources.append(kept)

    def end_early(self) -> None:
        """Called where the program ends before its time: what a piece starts from later is not made any more."""
        around = self._around
        if around is not None:
            self._starts = {
                number: start
                for number, start in self._starts.items()
                if all([around._kept(source) is not None for source in start.wish.lead])
            }

    def _kept(self, number: int) -> Kept | KeptCompact | None:
        ref = self._sources.get(number)
        return None if ref is None else ref()

    def rebuild(self, asked: Waiting) -> None:
        """Has everybody who waits hold the contents asked for, by running what leads to them.

        Once in a backward everybody was served: who asks again is served alone.
        """
        now = _backward_id()
        waiting = [asked]
        if now != self._rebuilt_in:
            pending = [ref() for ref in self.pending]
            waiting = [each for each in pending if each is not None and each.held is None]
        with rerunning():
            numbers = frozenset([each.wish.number for each in waiting])
            begun = {number: start.take() for number, start in self._starts.items()}
            found = self._program.code(numbers).run(self._start, begun, self._is_compact, self._noted)
            if len(found) < len(numbers):
                found |= {w.wish.number: self._whole(w.wish, begun) for w in waiting if w.wish.number not in found}
            for each in waiting:
                each.held = found[each.wish.number]
        self._rebuilt_in = now
        execution_context.count("num_rederived", self._counts, len(waiting))

    def _whole(self, wish: Wish, begun: dict[int, torch.Tensor]) -> torch.Tensor:
        """Returns a value that no op of the segment makes: the segment begins with it, or it is held by itself."""
        if wish.number in begun:
            return begun[wish.number]
        start = self._start(wish.number).detach()
        return start if wish.base is None or isinstance(wish.base, Varied) else laid(start, wish.base)

    def _start(self, number: int) -> torch.Tensor:
        """Returns what a rebuild starts from, which may be the kept tensor itself."""
        kept = self._kept(number)
        if kept is not None:
            return kept.contents()
        constant = self._constants[number]
        return constant.tensor if constant.is_as_read() else parameter_of(constant)

    def _is_compact(self, number: int) -> bool:
        return type(self._kept(number)) is KeptCompact
