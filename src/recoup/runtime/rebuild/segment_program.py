"""How a segment of a step is rebuilt in the steps that follow its program ([Note: step programs])."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import cast

from recoup.runtime.rebuild.dynamic_shapes import Varied
from recoup.runtime.rebuild.op_forms import OpForm
from recoup.runtime.rebuild.rebuild_code import RebuildCode, Rerun
from recoup.runtime.rebuild.rewriting import Versions
from recoup.runtime.rebuild.saved_tensor import MIN_BYTES
from recoup.runtime.rebuild.segments import Rebuilt
from recoup.runtime.rebuild.values import Geometry, Value
from recoup.runtime.rebuild.varied_ops import VariedOps
from recoup.thresholds import MOST_REMEMBERED_ANSWERS


class RebuiltSave:
    """A saved tensor that is rebuilt, as a step is noted: of a branch that leads to nothing it is gone before the end.

    Attributes:
        segment, value, geometry: as the `Rebuilt`'s.
        held: the held values that lead to it. held_around: to what its piece starts from. Each with what keeps it.
    """

    __slots__ = ("_packed", "geometry", "held", "held_around", "segment", "value")

    def __init__(self, packed: Rebuilt) -> None:
        self._packed = weakref.ref(packed)  # it holds tensors
        self.value, self.geometry = packed.value, packed.geometry
        self.look()

    def look(self) -> None:
        """Notes the rest of it, which another segment may have taken over by now."""
        packed = self._packed()
        if packed is None:
            return
        self.segment = segment = packed.segment
        self.held = segment.held_below(self.value)
        self.held_around: dict[Value, type] = {}
        if segment.around is not None:
            for start in segment.starts:
                self.held_around |= segment.around.held_below(start)


class NotedSegment:
    """A segment of a step that is noted.

    Attributes:
        number: its own. asked: the geometries that values are asked for in. held: what these are rebuilt from, each
            with the class of what keeps it.
    """

    __slots__ = ("asked", "held", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.asked: dict[Value, list[Geometry]] = {}
        self.held: dict[Value, type] = {}


class Lead:
    """The held values that lead to a value: those that lead to another one, and more.

    Values of a long chain have many in common; who is rebuilt from them holds what those before it hold, and its own.

    Attributes:
        below: the other one's, None for none. more: numbers of the held values besides, in order.
    """

    __slots__ = ("below", "more")

    def __init__(self, below: Lead | None, more: tuple[int, ...]) -> None:
        self.below = below
        self.more = more

    def __iter__(self) -> Iterator[int]:
        lead: Lead | None = self
        while lead is not None:
            yield from lead.more
            lead = lead.below


class Wish:
    """What is asked for of a rebuilt value, the same in every step.

    Attributes:
        number: of the value. base: geometry of what fills its storage. geometry: the one that it is wanted in.
        view: size, strides and offset of that, None where it is `base`, or another in each step.
        segment: which rebuilds it. lead: what leads to it.
    """

    __slots__ = ("base", "geometry", "lead", "number", "segment", "view")

    def __init__(self, number: int, base: Geometry | None, geometry: Geometry | None, segment: int, lead: Lead) -> None:
        self.number = number
        self.base = base
        self.geometry = geometry
        self.view = None if geometry is None or geometry is base or isinstance(geometry, Varied) else geometry[:3]
        self.segment = segment
        self.lead = lead


class SegmentProgram(VariedOps):
    """How a segment is rebuilt.

    Attributes:
        sources, constants: numbers of the held values and parameters that its ops start from. around: the segment that
            this is a piece of, -1 for none. starts: numbers of the values of that which a piece starts from. asked: the
            geometries that values are asked for in. narrow: the sources that are kept in a smaller dtype, as random
            masks are.
    """

    __slots__ = ("_leads", "_nothing", "around", "asked", "constants", "narrow", "sources", "starts")

    def __init__(self, around: int) -> None:
        super().__init__()
        self.around = around
        self.sources: set[int] = set()
        self.constants: set[int] = set()
        self.narrow: set[int] = set()
        self.starts: set[int] = set()
        self.asked: dict[int, list[Geometry]] = {}
        self._leads: dict[int, Lead] = {}
        self._nothing = Lead(None, ())

    def lead_of(self, wanted: int) -> Lead:
        """Returns the sources that lead to a value; where they are the same, the very same object."""
        if not self._leads:
            self._find_leads()
        return self._leads.get(wanted, self._nothing)

    def _find_leads(self) -> None:
        leads = self._leads
        leads.update((number, Lead(None, (number,))) for number in self.sources)
        all_of = {lead: frozenset(lead.more) for lead in (*leads.values(), self._nothing)}
        known = {numbers: lead for lead, numbers in all_of.items()}
        for _, reads, results in self.ops:
            below = [leads[read] for read in reads if read in leads]
            numbers = frozenset().union(*[all_of[lead] for lead in below])
            lead = known.get(numbers)
            if lead is None:
                most = max(below, key=lambda each: len(all_of[each]))
                lead = known[numbers] = Lead(most, tuple(sorted(numbers - all_of[most])))
                all_of[lead] = numbers
            leads.update((number, lead) for _, number in results)

    def code(self, wanted: frozenset[int]) -> RebuildCode:
        """Returns what rebuilds these values."""
        found = self._codes.get(wanted)
        if found is None:
            if len(self._codes) >= MOST_REMEMBERED_ANSWERS:
                self._codes.clear()
            found = self._codes[wanted] = RebuildCode(
                self._of_all_sizes(self._leading_to(wanted), [twin._leading_to(wanted) for twin in self.twins]),
                wanted,
                starts=self.starts,
                bases=self._kinds or self.bases,
                narrow=self.narrow,
            )
        return found

    def _leading_to(self, wanted: frozenset[int]) -> list[Rerun]:
        needed = set(wanted)
        chosen: list[tuple[Rerun, OpForm, list[int]]] = []
        last: set[int] = set()
        for at, (form, reads, results) in reversed([*enumerate(self.ops)]):
            gives = tuple([(position, number) for position, number in results if number in needed])
            if not gives:
                continue
            laid_out = []
            for number, geometry in zip(reads, form.geometries, strict=True):
                is_start = number in self.sources or number in self.constants
                laid_out.append((number, geometry if is_start or geometry != self.bases[number] else None))
            drops = tuple({n for n in reads if n not in last and n not in wanted and n not in self.constants})
            over = [i for i in form.targets if reads[i] not in last and form.geometries[i] == self.bases.get(reads[i])]
            last.update(reads)
            needed.update(reads)
            chosen.append((Rerun(form, tuple(laid_out), gives, drops, -1, at), form, over))
        chosen.reverse()
        versions: Versions[int] = Versions({number: self.asked.get(number, []) for number in wanted})
        for number in self.narrow:  # made anew when it is read
            versions.add(number)
        found = []
        for rerun, form, over in chosen:
            part = cast(Geometry, form.part)
            writes = next((at for at in over if versions.is_free(rerun.reads[at][0], part)), -1)
            for _, number in rerun.gives:
                versions.add(number, rerun.reads[writes][0] if writes >= 0 else None)
            found.append(dataclasses.replace(rerun, writes=writes))
        return found


def is_slight(geometry: Geometry) -> bool:
    """Whether a tensor that lies so weighs nothing beside activations: indices, masks, a few numbers."""
    size, _, _, dtype = geometry
    return not dtype.is_floating_point or bool(size.numel() * dtype.itemsize <= MIN_BYTES)
