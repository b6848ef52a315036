"""The program of steps whose sizes vary, from two steps that did the same with tensors of other sizes.

[Note: dynamic shapes]
1. Two programs are compared item by item. What is the same in both is the same in every step, as in any program. Of the
   sizes, strides and numbers that differ it is known only what both have in common (`dynamic_shapes.py`).
2. A step follows it as any program: by the functions, the numbers that are the same, and the very tensors handed from
   call to call. Tensors new to the step, and those that a rebuild rests on, are of the kind that both steps had.
3. How an op that runs again reads a tensor is noted when its call is handed it, and how a rebuilt tensor is wanted when
   autograd saves it. The rest follows: the same op on tensors that lie as they did gives what lies as it did.
4. An op whose numbers differ does not run again: then there is no such program. Nor is there one where the steps differ
   in what was kept, in what was rebuilt from what, or in how many calls they made.
5. A step that is of another kind leaves the program as it would leave any; the next one is learned, and what it has in
   common with the program takes its place.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from recoup.runtime.rebuild.call_code import Nest, Place, follow_code
from recoup.runtime.rebuild.call_forms import CallForm
from recoup.runtime.rebuild.derived import Rebuilding
from recoup.runtime.rebuild.dynamic_numbers import Differ, Numbers, with_numbers
from recoup.runtime.rebuild.dynamic_shapes import (
    AnyOf,
    Lay,
    Layout,
    Number,
    Regrouped,
    Reshaped,
    Varied,
    common,
    grouping,
    reshaping,
    turned,
)
from recoup.runtime.rebuild.of_any_size import BY_SIZE, is_of_any_size
from recoup.runtime.rebuild.rewriting import Rewriting
from recoup.runtime.rebuild.segment_program import SegmentProgram
from recoup.runtime.rebuild.step_program import REBUILD, ProgramCall
from recoup.runtime.rebuild.values import Geometry
from recoup.runtime.rebuild.varied_ops import VariedForm, VariedOps

_SAME_CALL = operator.attrgetter(
    *("func", "reads", "binds", "enters", "gives", "keeps", "keeps_results", "reads_constants", "draws"),
    *("first_save", "end_save", "last_save", "is_hooked", "stays_hooked", "has_grad", "deriving", "is_loose", "names"),
)
_SAME_BOUNDARY = operator.attrgetter("path", "is_watched", "is_told", "num_ops", "deriving", "index", "untold")
_SAME_SEGMENT = operator.attrgetter("around", "sources", "constants", "narrow", "starts")
_SAME_OP = operator.attrgetter("first", "is_single", "is_cast", "targets")
_SAME_PROGRAM = operator.attrgetter("num_slots", "masks", "casts")


def _same(one: Any, other: Any) -> None:
    if type(one) is not type(other) or one != other:
        raise Differ


class Comparison:
    """Compares two programs, and collects what is to be changed of the later one.

    Args:
        before: of an earlier step, or of several. program: of the latest.

    Attributes:
        changes: to be made if they differ in sizes alone. num_varied: geometries and numbers that differ.
    """

    def __init__(self, before: Any, program: Any) -> None:
        self._before = before
        self._program = program
        self.changes: list[Callable[[], None]] = []
        self.num_varied = 0
        self._noted: dict[tuple[int, tuple[int, ...]], Layout | Number] = {}  # by call, and what of which argument
        self._open: set[int] = set()  # slots of tensors whose geometry does not follow from what is compared
        self._open_calls: set[ProgramCall] = set()
        self._open_saves: set[int] = set()
        self._own: set[int] = set()  # slots of what an op made, as it came from it

    def unites(self) -> bool:
        """Has the later program be that of steps with other sizes, too, if the two differ in nothing else."""
        try:
            self._compare()
        except (Differ, ValueError):
            return False
        if not self.num_varied:
            return False
        for change in self.changes:
            change()
        return True

    def _compare(self) -> None:
        """Compares them.

        Raises:
            Differ, ValueError: they did not do the same.
        """
        one, other = self._before, self._program
        _same(_SAME_PROGRAM(one), _SAME_PROGRAM(other))
        _same(len(one.calls), len(other.calls))
        _same([id(ref()) for ref in one.constants], [id(ref()) for ref in other.constants])
        for a, b in zip(one.boundaries, other.boundaries, strict=True):
            _same(_SAME_BOUNDARY(a), _SAME_BOUNDARY(b))
            _same(sorted(a.leaves), sorted(b.leaves))
            _same(None if a.call is None else a.call.index, None if b.call is None else b.call.index)
        for calls in zip(one.calls, other.calls, strict=True):
            self._compare_calls(*calls)
        self._open_saves = {at for call in self._open_calls for at in range(call.first_save, call.last_save)}
        self._compare_rest()
        self._compare_apart()
        self.changes.append(self._finish)

    def _compare_rest(self) -> None:
        """Compares what is rebuilt, and what is saved."""
        one, other = self._before, self._program
        for value, of in zip(one.values, other.values, strict=True):
            _same(value.is_passing, of.is_passing)
            self._set(of, "base", self._common(value.base, of.base))
        for segments in zip(one.segments, other.segments, strict=True):
            self._compare_segments(*segments)
        self._compare_saves()

    def _set(self, item: Any, name: str, value: Any) -> None:
        self.changes.append(lambda: setattr(item, name, value))

    def _common(self, one: Geometry | Varied | None, other: Geometry | None) -> Geometry | Varied | None:
        found = common(one, other)
        self.num_varied += isinstance(found, Varied)
        return found

    def _common_base(self, number: int) -> Geometry | Varied | None:
        return common(self._before.values[number].base, self._program.values[number].base)

    # -- calls --------------------------------------------------------------------------------------------------

    def _compare_calls(self, one: ProgramCall, other: ProgramCall) -> None:
        _same(_SAME_CALL(one), _SAME_CALL(other))
        _same(sorted(one.leaves), sorted(other.leaves))
        if one.is_loose:
            return
        if one.form is None or other.form is None:
            _same(one.form, other.form)  # it may run as many ops as it likes: the tiles of a loss
            pairs = zip(one.scalars, other.scalars, strict=True)
            scalars = [(self._scalar_kind(a[0], b[0]), self._scalar(a[1], b[1])) for a, b in pairs]
            self._set(other, "scalars", scalars)
            is_open = True
        else:
            _same((one.form.state, one.num_ops), (other.form.state, other.num_ops))
            _same(one.form.attention_flags, other.form.attention_flags)
            if one.items is None or other.items is None:
                raise Differ
            items = [self._item(a, b) for a, b in zip(one.items, other.items, strict=True)]
            self._set(other, "items", items)
            is_open = any(map(_has_varied, items)) or not self._open.isdisjoint(other.reads)
        if one.binds and one.form is not None and other.form is not None:
            new = [i for i, slot in enumerate(other.reads) if slot < 0]
            kinds = [self._common(one.kind_of(i), other.form.geometries[i]) for i in new]
            self._set(other, "kinds", dict(zip(new, kinds, strict=True)))
            varied = {i for i, kind in zip(new, kinds, strict=True) if isinstance(kind, Varied)}
            self._open.update(slot for i, slot in other.enters if i in varied)
            is_open = is_open or bool(varied)
        elif one.binds:
            self._open.update(slot for _, slot in other.enters)
        views = []
        for (*a, (geometry, needs)), (*b, (of, is_needed)) in zip(one.views, other.views, strict=True):
            _same((*a, needs), (*b, is_needed))
            views.append((*b, (self._common(geometry, of), is_needed)))
        self._set(other, "views", tuple(views))
        if is_open:
            self._open.update(slot for _, slot in other.gives)
            self._open.update(view[1] for view in other.views)
            self._open_calls.add(other)
            if other.func in BY_SIZE:
                raise Differ
            if other.form is not None and other.form.attention_flags is not None:
                assert one.form is not None  # as the other's
                self._compare_attention(one.form, other.form)
                self._set(other, "looks_at_choice", True)
        if other.form is not None:
            made = {position for position, _, _ in other.form.results}
            self._own.update(slot for position, slot in other.gives if position in made)

    def _compare_attention(self, one: CallForm, other: CallForm) -> None:
        """Which kernel an attention takes may follow from the sizes: that is asked in each step.

        Autocast's casts would come between, where there is something to cast.
        """
        _same(one.attention_choice, other.attention_choice)
        if other.attention_choice is None or (other.state[2] is not None and torch.float32 in other.dtypes):
            raise Differ

    def _scalar_kind(self, one: type, other: type) -> type:
        _same(one, other)
        return other

    def _scalar(self, one: Any, other: Any) -> Any:
        if isinstance(one, AnyOf):
            _same(one.kind, type(other))
            return AnyOf(other)
        if type(one) is not type(other):
            raise Differ
        if repr(one) == repr(other):
            return other
        self.num_varied += 1
        return AnyOf(other)

    def _item(self, one: Any, other: Any) -> Any:
        """Returns what two arguments have in common."""
        if isinstance(other, Place):
            if not isinstance(one, Place) or one.number != other.number:
                raise Differ
            return other
        kind = other.kind if isinstance(other, Nest) else type(other)
        if kind not in (list, tuple, torch.Size):
            return self._scalar(one, other)
        parts = one.parts if isinstance(one, Nest) else one
        of = other.parts if isinstance(other, Nest) else other
        if kind is not (one.kind if isinstance(one, Nest) else type(one)) or len(parts) != len(of):
            raise Differ
        found = [self._item(a, b) for a, b in zip(parts, of, strict=True)]
        is_varied = any([isinstance(part, (AnyOf, Nest)) for part in found])
        return Nest(kind, found) if is_varied or isinstance(other, Nest) else other

    # -- what is rebuilt ------------------------------------------------------------------------------------------

    def _compare_segments(self, one: SegmentProgram | Rebuilding, other: SegmentProgram | Rebuilding) -> None:
        _same(_SAME_SEGMENT(one), _SAME_SEGMENT(other))
        _same(one.asked.keys(), other.asked.keys())
        _same(len(one.ops), len(other.ops))
        layouts: dict[tuple[int, int], Lay] = {}
        forms: dict[int, VariedForm] = {}
        made: dict[int, bool] = {}  # whether how it lies does not follow from what is compared
        held = other.sources | other.constants
        if other.around >= 0:  # a piece may start from what the segment around it does not make, either
            held |= self._program.segments[other.around].sources & other.starts
        for at, ((form, reads, gives), (of, *rest), call) in enumerate(
            zip(one.ops, other.ops, other.calls, strict=True)
        ):
            _same([reads, gives], rest)
            self._compare_ops(form, of)
            numbers = Numbers(one.calls[at], call, of)
            known = one.form_of(at)
            rest, kwargs = numbers.merged(known.rest, of.rest), numbers.merged(known.kwargs, of.kwargs)
            if numbers.places:
                noted = {place: self._note_number(call, place) for place in numbers.places}
                forms[at] = VariedForm(of, with_numbers(rest, noted), with_numbers(kwargs, noted))
            if call.form is None or (call in self._open_calls and not is_of_any_size(call.func, of)):
                raise Differ
            picks = other.picks(at)
            if len(picks) != len(reads):
                raise Differ
            all_of = (*one.twins, one, other)
            follows = True
            for place, number in enumerate(reads):
                geometries = [each.ops[at][0].geometries[place] for each in all_of]
                is_inside = picks[place] >= len(call.form.geometries)
                if is_inside:
                    is_open = made.get(number, call in self._open_calls)
                else:
                    is_open = call.reads[picks[place]] in self._open
                follows = follows and not is_open
                if not is_open and all([geometry == geometries[0] for geometry in geometries]):
                    continue
                # Else it is made, or made anew, as it lay, or was drawn so.
                is_start = number in held and number not in other.narrow and number not in call.draws.values()
                is_own = is_inside or call.reads[picks[place]] in self._own
                are_bases = [g == each.bases.get(number) for g, each in zip(geometries, all_of, strict=True)]
                lies_so = is_own and not is_start and all(are_bases)
                is_kept = is_start and is_inside
                if lies_so or (is_kept and self._is_kept_so(one, (at, place), number, geometries[-2:])):
                    layouts[at, place] = None
                elif is_inside and not is_start:
                    layouts[at, place] = self._regrouped([each.bases[number] for each in all_of], geometries)
                else:
                    calls = [each.calls[at] for each in all_of]  # of earlier steps and of this one
                    layouts[at, place] = self._layout(call, picks[place], calls, geometries)
            made.update((number, not follows) for _, number in gives)
        _same(one.bases.keys(), other.bases.keys())
        bases = {number: self._common(one.base_of(number), base) for number, base in other.bases.items()}
        is_varied = any(layouts.values()) or forms or any([isinstance(base, Varied) for base in bases.values()])
        if is_varied:
            twins = (*one.twins, one)
            self.changes.append(lambda: other.vary(layouts, bases, forms, twins))

    def _compare_ops(self, one: Any, other: Any) -> None:
        _same(_SAME_OP(one), _SAME_OP(other))
        op = other.op.op
        if isinstance(op, Rewriting) and isinstance(one.op.op, Rewriting):
            _same(one.op.op.op, op.op)
            if one.part != other.part:
                _same([one.part, other.part], [one.geometries[0], other.geometries[0]])
                self._set(op, "is_whole", True)
        else:
            _same(one.op.op, op)

    def _note_number(self, call: ProgramCall, place: tuple[int, ...]) -> Number:
        """Has an argument of a call noted in each step."""
        found = self._noted.setdefault((call.index, place), Number(len(self._noted), place))
        assert isinstance(found, Number)
        return found

    def _is_kept_so(self, one: VariedOps, key: tuple[int, int], number: int, geometries: Sequence[Geometry]) -> bool:
        """Whether what an op reads, made inside of its call, lies as autograd saves it, and is kept as that."""
        if one.twins:
            return one.lies_as_kept(key)
        return [self._before.kept_geometry(number), self._program.kept_geometry(number)] == [*geometries]

    def _regrouped(self, bases: Sequence[Geometry], geometries: Sequence[Geometry]) -> Regrouped | Reshaped:
        """Returns how an op reads what an op of the same call has made."""
        pairs = [*zip(bases, geometries, strict=True)]
        groups = grouping(pairs)
        found = reshaping(pairs) if groups is None else Regrouped(groups)
        if found is None:
            raise Differ
        return found

    def _layout(
        self, call: ProgramCall, pick: int, calls: Sequence[ProgramCall], geometries: Sequence[Geometry]
    ) -> Layout:
        """Returns how an op reads a tensor of its call, whose geometry varies."""
        assert call.form is not None
        forms = [each.form for each in calls if each.form is not None]
        over = [pick, *[other for first, other in call.form.aliases if first == pick]]
        shortest = min([len(form.geometries) for form in forms])
        for position, is_turned in itertools.product([at for at in over if at < shortest], (False, True)):
            # of tensors that lie over the memory that it reads
            handed = [form.geometries[position] for form in forms]
            groups = grouping([*zip(map(turned, handed) if is_turned else handed, geometries, strict=True)])
            if groups is not None:
                break
        else:
            raise Differ
        key = call.index, (-1, position, int(is_turned), *groups)
        found = self._noted.get(key)
        if found is None:
            kind: Any = handed[0]
            for each in handed[1:]:
                kind = common(kind, each)
            self.num_varied += 1
            found = self._noted[key] = Layout(len(self._noted), position, groups, kind, is_turned=is_turned)
        assert isinstance(found, Layout)
        return found

    # -- what is saved ------------------------------------------------------------------------------------------

    def _compare_saves(self) -> None:
        saves = []
        for at, (one, other) in enumerate(zip(self._before.saves, self._program.saves, strict=True)):
            _same(one[:3], other[:3])
            number = other[2]
            mine = self._before.geometry_of_save(one)
            theirs = self._program.geometry_of_save(other)
            geometry = self._common_save(at, mine, theirs) if number >= 0 or other[0] == REBUILD else None
            mask = self._program.masks.get(at)
            if mask is not None and isinstance(self._common_base(mask), Varied):
                for program, wanted in ((self._before, mine), (self._program, theirs)):
                    base = program.values[mask].base
                    if not isinstance(base, Varied) and (base is None or wanted is None or base[:3] != wanted[:3]):
                        raise Differ
            saves.append((*other[:3], geometry))
        self._set(self._program, "saves", saves)

    def _common_save(self, at: int, one: Geometry | Varied | None, other: Geometry | None) -> Geometry | Varied | None:
        """Returns the geometry of a saved tensor: of a kind, to be looked at, if it does not follow from the calls."""
        found = self._common(one, other)
        if found is None or isinstance(found, Varied) or at not in self._open_saves:
            return found
        return Varied(tuple(found[0]), found, found[2])

    def _compare_apart(self) -> None:
        one, other = self._before.apart, self._program.apart
        _same(one.keys(), other.keys())
        for at, of in other.items():
            _same((one[at].slot, one[at].is_last), (of.slot, of.is_last))
            self._set(of, "geometry", self._common(one[at].geometry, of.geometry))

    def _finish(self) -> None:
        """Has the changed program be followed: once all else was changed."""
        for call in self._program.calls:
            noted = [each for (index, _), each in self._noted.items() if index == call.index]
            call.layouts = [each for each in noted if isinstance(each, Layout)]
            call.numbers = [each for each in noted if isinstance(each, Number)]
            call.follow = follow_code(call)
        self._program.vary()


def _has_varied(item: Any) -> bool:
    """Whether a number varies in an argument."""
    return isinstance(item, AnyOf) or (isinstance(item, Nest) and any(map(_has_varied, item.parts)))
