"""Learns the program of a step while it is recorded, see [Note: step programs]."""

from __future__ import annotations

import bisect
from collections.abc import Collection
from typing import cast

from recoup.runtime.rebuild.boundaries import Idle, read_anew
from recoup.runtime.rebuild.kept import Kept, KeptConstant, KeptView
from recoup.runtime.rebuild.op_forms import Noted
from recoup.runtime.rebuild.segment_program import NotedSegment, RebuiltSave, SegmentProgram, is_slight
from recoup.runtime.rebuild.segments import Segment
from recoup.runtime.rebuild.step_notes import StepNotes
from recoup.runtime.rebuild.step_program import CONSTANT, KEEP, REBUILD, Saved, StepProgram, last_uses
from recoup.runtime.rebuild.values import Geometry, Value
from recoup.thresholds import SMALL_BYTES

_Segments = dict[Segment, NotedSegment]


class Learning(StepNotes):
    """Makes the program of a step that was noted."""

    def program(self) -> StepProgram | None:
        """Returns the program of the step that was noted, None if it has none."""
        if self.failed or self.is_open:
            return None
        segments: dict[Segment, NotedSegment] = {}
        saves: list[Saved] = []
        for kind, value, geometry in self._saves:
            if isinstance(kind, RebuiltSave):
                kind.look()
                if (around := kind.segment.around) is not None:
                    noted = segments.setdefault(around, NotedSegment(len(segments)))
                    noted.held.update(kind.held_around)
                    for start in kind.segment.starts:
                        noted.asked.setdefault(start, []).append(cast(Geometry, start.base))
                noted = segments.setdefault(kind.segment, NotedSegment(len(segments)))
                noted.held.update(kind.held)
                noted.asked.setdefault(kind.value, []).append(kind.geometry)
                own = None if kind.value.base == kind.geometry else kind.geometry
                saves.append((REBUILD, noted.number, self._number(kind.value), own))
            elif kind is Kept or kind is KeptView:
                number = -1 if value is None or value.constant is not None else self._number(value)
                saves.append((KEEP, -1, number, geometry))
            elif kind is KeptConstant:
                saves.append((CONSTANT, -1, -1, None))
            else:
                return None
        rebuilt = {number for kind, _, number, _ in saves if kind == REBUILD}
        ahead: set[Value] = set()  # what is written over is rebuilt from nowhere: what is made of it is kept, if slight
        while True:
            programs = [self._segment(segment, segments, ahead) for segment in segments]
            found = [p for p in programs if p is not None]
            starts = {n for p in found for n in p.sources | p.constants}
            over = {v for v in self._written if self._numbers.get(v, -1) in starts | rebuilt}
            if over <= ahead:
                break
            ahead |= over
        if over or len(found) < len(programs):  # it raises in backward, as plain would
            return None
        kept_numbers = {number for kind, _, number, _ in saves if kind == KEEP}
        if not self._place(found, kept_numbers):
            return None
        shown = {at: self._numbers.get(mask, -1) for mask, at in self._shown.items()}
        masks = {at: n for at, n in shown.items() if n in starts and saves[at][2] != n}
        # What a call keeps needs no hook where autograd saves it, but to have what is written to later copied in time.
        by_calls = {n for call in self._calls for _, n in (*call.keeps, *call.keeps_results)}
        by_calls -= {n for value, n in self._numbers.items() if value.is_passing} | {n for p in found for n in p.narrow}
        asked = starts - by_calls
        saves = [(k, s, n if k != KEEP or n in asked else -1, g) for k, s, n, g in saves]
        last = last_uses(saves, found)
        seen = {at for at, (kind, _, number, _) in enumerate(saves) if kind == REBUILD or number >= 0}
        seen |= self._casts | masks.keys()
        numbered = starts | rebuilt
        self._rests.values.update(value for value, number in self._numbers.items() if number in numbered)
        held = [{n for _, n in (*call.keeps, *call.keeps_results)} for call in self._calls]
        end = next((i for i, numbers in enumerate(held) if not numbers <= kept_numbers), len(held))
        first_saves = [call.first_save for call in self._calls]
        idle = self._let_go(seen, end)
        apart = self._apart.placed(self._calls)
        if apart is None:
            return None
        self._let_held_go(last, first_saves, idle)
        values = [value.without_history() for value in self._numbers]
        parts = values, self._slots.num, self._constants, masks, frozenset(self._casts), frozenset(seen)
        program = StepProgram(self._calls, saves, found, *parts, idle.boundaries, apart)
        idle.place([*program.calls, program.end])
        return program

    def _segment(self, segment: Segment, noted: _Segments, ahead: set[Value]) -> SegmentProgram | None:
        """Returns how a segment is rebuilt, None if something that it starts from cannot be held."""
        wanted, held = noted[segment].asked, noted[segment].held
        program = SegmentProgram(-1 if segment.around is None else noted[segment.around].number)
        ops: dict[int, tuple[Noted, set[Value]]] = {}
        stack, seen = list(wanted), set(wanted)
        while stack:
            value = stack.pop()
            number = self._number(value)
            if value.constant is not None:
                program.constants.add(number)
                continue
            if value.base is not None:
                program.bases[number] = value.base
            if value in held:
                if held[value] is not Kept:
                    if value not in self._shown and value not in self._hidden:
                        return None
                    program.narrow.add(number)
                program.sources.add(number)
                continue
            if value.base is None:
                return None
            if value in segment.starts:
                program.starts.add(number)
                continue
            made = value.made if type(value.made) is Noted else None
            if made is None and not is_slight(value.base):
                return None
            is_list = self.keeps_lists and made is not None and not made.values and value in self._seen
            is_kept = value in self._seen and is_slight(value.base)
            if (
                made is None
                or (is_list and value.num_bytes() <= SMALL_BYTES)
                or (is_kept and not ahead.isdisjoint(made.values))
            ):
                # Made by a call without form, from nothing (`arange`), or from indices that are written over.
                program.sources.add(number)
                continue
            ops.setdefault(made.order, (made, set()))[1].add(value)
            self._rests.orders.add(made.order)
            self._rests.values.update((value, *made.values))
            for read in made.values:
                if read not in seen:
                    seen.add(read)
                    stack.append(read)
        for order in sorted(ops):
            made, results = ops[order]
            gives = tuple(sorted([(value.output, self._number(value)) for value in results]))
            program.ops.append((made.form, tuple([self._number(read) for read in made.values]), gives))
            program.calls.append(self._calls[self._rests.call_of(order)])
        program.asked = {self._number(value): geometries for value, geometries in wanted.items()}
        return program

    def _place(self, segments: list[SegmentProgram], kept: set[int]) -> bool:
        """Has what segments start from held at the call where it is first met; whether each is met.

        Args:
            kept: numbers of what is kept where autograd saves it, which is early enough for what no call returns.
        """
        by_number = {number: value for value, number in self._numbers.items()}
        for attribute, numbers in (
            ("sources", {n for s in segments for n in s.sources}),
            ("constants", {n for s in segments for n in s.constants}),
        ):
            for number in sorted(numbers):
                value = by_number[number]
                if value in self._hidden:
                    call, position = self._hidden[value]
                    call.draws[position] = number
                    continue
                where = self._seen.get(value)
                if where is None and (value in self._shown or (number in kept and attribute == "sources")):
                    continue
                if where is None:
                    return False
                index, is_result, position = where
                call = self._calls[index]
                name = "reads_constants" if attribute == "constants" else "keeps_results" if is_result else "keeps"
                if attribute == "constants" and is_result:
                    return False
                setattr(call, name, (*getattr(call, name), (position, number)))
        return True

    def _let_go(self, seen: Collection[int], end: int) -> Idle:
        """Drops the calls of idle stretches, and notes after which of the others nobody reads a slot any more.

        Args:
            seen, end: as `Idle`'s.
        """
        self._apart.drop_others(seen)
        num_saved = len(self._saves)
        for call in reversed(self._calls):
            call.last_save, num_saved = num_saved, call.first_save
        watched = self._rests.on(self._calls, seen)
        idle = Idle(self._calls, self._passed, watched, seen, end if self._may_rest else 0)
        self._calls = [self._calls[i] for i in idle.stay]
        # Those that only idle calls read stay, too: whether they take part in gradients decides what is saved there.
        always = {slot for _, slot in self._constants}
        read_anew(self._calls, always)
        read: set[int] = set()
        for call in reversed(self._calls):
            self._apart.read_in(call, read)
            here = [slot for slot in call.reads if slot >= 0 and slot not in always]
            call.gives = tuple([(i, slot) for i, slot in call.gives if slot in read])
            call.views = tuple([view for view in call.views if view[1] in read])
            call.enters = tuple([(i, slot) for i, slot in call.enters if slot in read])
            call.leaves = tuple({slot for slot in here if slot not in read})
            read.update(here)
            call.reads = tuple(call.reads)
        return idle

    def _let_held_go(self, last: dict[int, int], first_saves: list[int], idle: Idle) -> None:
        """Notes after which call nobody asks for a held value any more, but who was given it before."""
        by_number = {number: value for value, number in self._numbers.items()}
        for number, saved in last.items():
            seen = self._seen.get(by_number[number])
            after = max(bisect.bisect_right(first_saves, saved), 0 if seen is None else seen[0] + 1)
            if after < len(first_saves):
                place = idle.begin(after) or self._calls[bisect.bisect_left(idle.stay, after)]
                place.leaves = (*place.leaves, self._slots.num + number)
