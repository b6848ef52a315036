"""A segment of a step that follows a program: what is held for it, and who waits for its rebuild."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from recoup import _torch
from recoup.runtime import execution_context
from recoup.runtime.rebuild.constant import Constant
from recoup.runtime.rebuild.kept import Kept, KeptCompact, laid
from recoup.runtime.rebuild.rederived import rerunning
from recoup.runtime.rebuild.rerun import parameter_of
from recoup.runtime.rebuild.segment_program import Lead, SegmentProgram
from recoup.runtime.rebuild.segments import Wanted
from recoup.runtime.rebuild.values import Value


class _Sources(list[Any]):
    """What keeps the held values of a `Lead`: the list of the one below, and its own. It can be referred to weakly."""

    __slots__ = ("__weakref__",)


class SegmentRun:
    """A segment of a step that follows a program, in the place of a recorded step's `Segment`.

    Attributes:
        pending: as `Segment`'s.

    Args:
        around: the run of the segment that this is a piece of. values: by number.
    """

    __slots__ = (
        "__weakref__",
        "_constants",
        "_counts",
        "_late",
        "_lists",
        "_program",
        "_sources",
        "_starts",
        "pending",
    )

    def __init__(
        self, program: SegmentProgram, constants: dict[int, Constant], around: SegmentRun | None, values: list[Value]
    ) -> None:
        self._counts = execution_context.current_counts()
        self._program = program
        self._constants = constants
        self.pending: list[weakref.ref[Wanted]] = []
        self._sources: dict[int, weakref.ref[Kept | KeptCompact]] = {}
        self._late: dict[int, list[_Sources]] = {}
        self._lists: dict[Lead, weakref.ref[_Sources]] = {}  # whoever is rebuilt from them has the list
        self._starts: dict[int, Wanted] = {}
        if around is not None:
            starts = {n: Wanted(values[n], around, around.sources_of(n), n) for n in program.starts}
            self._starts = starts

    def sources_of(self, number: int) -> list[Any]:
        """Returns what keeps the held values that lead to a value."""
        return self.holding(self._program.lead_of(number))

    def holding(self, lead: Lead) -> list[Any]:
        """Returns what keeps the held values of a lead; those that are kept later join the list then."""
        ref = self._lists.get(lead)
        found = None if ref is None else ref()
        return self._hold(lead) if found is None else found

    def _hold(self, lead: Lead) -> _Sources:
        new = [lead]
        found: _Sources | None = None
        while found is None and (below := new[-1].below) is not None:
            ref = self._lists.get(below)
            found = None if ref is None else ref()
            if found is None:
                new.append(below)
        for each in reversed(new):
            found = self._list(each, found)
        assert found is not None
        return found

    def _list(self, lead: Lead, below: _Sources | None) -> _Sources:
        found = _Sources()
        self._lists[lead] = weakref.ref(found)
        if below is not None:
            found.append(below)
        for source in lead.more:
            kept = self._kept(source)
            if kept is None:
                self._late.setdefault(source, []).append(found)
            else:
                found.append(kept)
        return found

    def keep(self, number: int, kept: Kept | KeptCompact) -> None:
        """Notes what keeps a held value that something is rebuilt from."""
        kept.is_source = True
        self._sources[number] = weakref.ref(kept)
        for sources in self._late.pop(number, ()):
            sources.append(kept)

    def _kept(self, number: int) -> Kept | KeptCompact | None:
        ref = self._sources.get(number)
        return None if ref is None else ref()

    def rebuild(self, asked: Wanted) -> None:
        """Has everybody who waits hold the contents asked for, by running what leads to them."""
        now = _torch.current_backward_id()
        waiting = [asked]
        for ref in self.pending:
            wanted = ref()
            if wanted is not None and wanted is not asked and wanted.held is None and wanted.taken_in != now:
                waiting.append(wanted)
        with rerunning():
            code = self._program.code(frozenset([wanted.number for wanted in waiting]))
            begun = {number: start.take() for number, start in self._starts.items()}
            found = code.run(self._start, begun, self._is_compact)
            for wanted in waiting:
                number = wanted.number
                tensor = found[number] if number in found else begun.get(number)
                if tensor is None:  # held by itself
                    start = self._start(number).detach()
                    tensor = start if wanted.value.base is None else laid(start, wanted.value.base)
                wanted.held = tensor
        execution_context.count("num_rederived", self._counts, len(waiting))

    def _start(self, number: int) -> torch.Tensor:
        """Returns what a rebuild starts from, which may be the kept tensor itself."""
        kept = self._kept(number)
        if kept is not None:
            return kept.contents()
        constant = self._constants[number]
        return constant.tensor if constant.is_as_read() else parameter_of(constant)

    def _is_compact(self, number: int) -> bool:
        return type(self._kept(number)) is KeptCompact
