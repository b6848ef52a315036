"""The program of a step: the calls and the fate of every saved tensor, replayed in the next step without recording.

[Note: step programs]
1. A step in which every call of a torch function has a form (`call_forms.py`) is noted: which calls came, with which
   scalars, which tensor was handed from which call to which, and what became of each tensor that autograd saved.
2. The next step is compared with it, call by call (`step_run.py`). The tensors passed to a call are the very objects
   that earlier calls of this step returned, or parameters, or new to the step; of new ones the metadata are compared.
   So by induction every tensor has the metadata it had, and what is saved of it is kept or rebuilt as before.
3. What is rebuilt from what is a list of ops on numbered values, one list a segment. Scalars are those of the step at
   hand: a call whose scalars differ is another call.
4. At the first call that is not the expected one the program ends, and the rest of the step is recorded. What was
   decided before stays valid: it rests on calls that have run. What the program holds is handed to the record.

Example: `h = relu(linear(x))`. The program has two calls, and says that relu's result, slot 1, is rebuilt from
linear's. In the next step `linear(x)` is compared by function, scalars and x's metadata, `relu` by being passed the
very tensor that this `linear` returned. If dropout comes instead of relu, that call and all later ones are recorded.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from recoup import _torch
from recoup.runtime.rebuild.call_code import Follow, follow_code, items_of
from recoup.runtime.rebuild.call_forms import CallForm, flattened
from recoup.runtime.rebuild.dynamic_shapes import Layout, Number, Varied
from recoup.runtime.rebuild.kept import kept_simply, kept_with_its_node
from recoup.runtime.rebuild.saved_apart import SavedApart
from recoup.runtime.rebuild.segment_program import SegmentProgram, Wish
from recoup.runtime.rebuild.values import PLAIN, Geometry, Value
from recoup.runtime.recompute.spot_check import Spots

KEEP, CONSTANT, REBUILD = range(3)
_storage_offset: Callable[[Any], Any] = torch.Tensor.storage_offset


class ProgramCall:
    """One call of the program.

    Attributes:
        func: the function. form: of the call, None if any call of the function will do.
        reads: slots of the call's tensors, -1 for one that is new to the step. binds: whether there is a new one.
        enters: position among the call's tensors and slot of those that are new and read again.
        leaves: slots that no later call reads. gives: position (-1: the result) and slot of results that are read.
        keeps: position among the call's tensors and number of values to hold. keeps_results: the same of results.
        reads_constants: the same of parameters that something is rebuilt from. draws: numbers of the random masks to
            hold that nothing which autograd saves tells, by their place among the leaves that are the call's own.
        num_ops: counted in it. first_save, end_save, last_save: tensors that autograd saved before it, after it, and
            before the next call.
        is_hooked, stays_hooked: whether the hooks are to see what autograd saves in it, and from then to the next call.
        has_grad: whether gradients were on.
        deriving: whether saved tensors were rebuilt after it.
        is_loose: whether only its function is compared, since nothing rests on it.
        items: what it was handed, see `items_of`; None where that is not plain. names: of the last of them, those given
            by name. follow: its code, None where it takes a closer look.
        index: its place. then: the call after it.
        views: of a call without form, results over memory of what it was handed, or of another result: position, slot,
            place of the tensor that it shares it with, its geometry and whether it takes part in gradients.
        kinds: in a program of steps whose sizes vary, of what geometry its tensors are that are new to the step, by
            position; else empty. layouts: what is noted there of how its tensors lie. numbers: those of its arguments
            that are noted for ops which run again. looks_at_choice: whether it is asked which kernel attention takes.
    """

    __slots__ = (
        "binds",
        "deriving",
        "draws",
        "end_save",
        "enters",
        "first_save",
        "follow",
        "form",
        "func",
        "gives",
        "has_grad",
        "index",
        "is_hooked",
        "is_loose",
        "items",
        "keeps",
        "keeps_results",
        "kinds",
        "last_save",
        "layouts",
        "leaves",
        "looks_at_choice",
        "names",
        "num_ops",
        "numbers",
        "reads",
        "reads_constants",
        "scalars",
        "stays_hooked",
        "then",
        "views",
    )

    def __init__(self, func: Any, form: CallForm | None, reads: list[int]) -> None:
        self.func = func
        self.form = form
        self.reads: Sequence[int] = reads
        self.binds = -1 in reads
        self.enters: Sequence[tuple[int, int]] = ()
        self.leaves: Sequence[int] = ()
        self.gives: Sequence[tuple[int, int]] = ()
        self.keeps: Sequence[tuple[int, int]] = ()
        self.keeps_results: Sequence[tuple[int, int]] = ()
        self.reads_constants: Sequence[tuple[int, int]] = ()
        self.draws: dict[int, int] = {}
        self.scalars: Any = None
        self.items: Sequence[Any] | None = None
        self.num_ops = self.index = 0
        self.names: tuple[str, ...] = ()
        self.follow: Follow | None = None
        self.views: Sequence[tuple[int, int, int, tuple[Geometry, bool]]] = ()
        self.kinds: dict[int, Any] = {}
        self.layouts: Sequence[Layout] = ()
        self.numbers: Sequence[Number] = ()
        self.then: ProgramCall | None = None
        self.first_save = self.end_save = self.last_save = 0
        self.deriving = self.has_grad = True
        self.is_hooked = self.stays_hooked = self.is_loose = self.looks_at_choice = False

    def note_items(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, tensors: Sequence[Any]) -> None:
        """Notes what it was handed: the number of each tensor among `tensors`, anything else as it is."""
        self.items = items_of((*args, *kwargs.values()) if kwargs else args, tensors)
        self.names = tuple(kwargs or ())

    def kind_of(self, position: int) -> Any:
        """Returns the geometry of one of its tensors that is new to the step."""
        assert self.form is not None
        return self.kinds.get(position, self.form.geometries[position])

    def loosen(self) -> None:
        """Has only its function compared."""
        self.is_loose = True
        self.form, self.reads = None, ()
        self.binds = False
        self.enters, self.gives, self.views = (), (), ()


class Boundary:
    """Where a patched module is entered or left, see [Note: idle stretches].

    Attributes:
        path: of the module that is entered, None where one is left; neither behind the last boundary.
        is_watched: whether modes are on behind it.
        is_told: whether somebody is told of it.
        num_ops: counted since the boundary before, in the module around both. deriving: as `ProgramCall`'s.
        leaves: as `ProgramCall`'s. call: the next that is watched. index: its place. then: the next that somebody is
            told of. untold: paths of modules that nobody is told of, entered since the last that somebody was.
    """

    __slots__ = ("call", "deriving", "index", "is_told", "is_watched", "leaves", "num_ops", "path", "then", "untold")

    def __init__(self, path: str | bool | None, *, num_ops: int, deriving: bool, is_watched: bool) -> None:
        self.path = path
        self.is_watched = is_watched
        self.is_told = True
        self.num_ops = num_ops
        self.deriving = deriving
        self.leaves: Sequence[int] = ()
        self.call: ProgramCall | None = None
        self.index = 0
        self.then: Boundary | None = None
        self.untold: frozenset[str] = frozenset()


def parts_of(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[list[Any], list[Any]]:
    """Returns the tensors of a call without form, and what is plain among its arguments, with its classes."""
    items = flattened((*args, *(kwargs or {}).values()))
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    return tensors, [(type(item), item if type(item) in PLAIN else None) for item in items]


class StepKey(NamedTuple):
    """What is equal for steps that may be alike, and what for those that may be but for the sizes of their inputs."""

    alike: Any
    of_any_size: Any


def like_step(module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any], entry: str = "") -> StepKey:
    """Returns the key of a step that begins so, by a call of a module, or of a method by its key."""
    items = (*args, *kwargs.values())
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    # A flag decides which way a step goes; a number may be another in each.
    shapes = [
        item.shape if isinstance(item, torch.Tensor) else item if type(item) in (bool, str) else type(item)
        for item in items
    ]
    dims = [len(shape) if isinstance(shape, torch.Size) else shape for shape in shapes]
    has_grad = tuple([tensor.requires_grad for tensor in tensors])  # more is saved in layers without gradients, then
    # `functional_call` puts tensors in the parameters' place, which nothing is rebuilt from.
    weight = None if module is None else type(next(module.parameters(), None))
    rest = entry, module is not None and module.training, weight, tuple(kwargs), _torch.is_autocast(), has_grad
    return StepKey((rest, tuple(shapes)), (rest, tuple(dims)))


Saved = tuple[int, int, int, Geometry | None]  # what becomes of it, segment, number of the value, geometry
Pack = Wish | Callable[[torch.Tensor], Any] | None


class StepProgram:
    """What a step under a plan by tensor did.

    Attributes:
        calls: in order. saves: what becomes of each tensor that autograd saves. packs: the same, ready for the hook: of
            what is rebuilt the wish, of what is kept and nobody else asks for a function that keeps it, None for what
            takes a closer look. wishes: by place, for all that is rebuilt. segments: how each is rebuilt. starts: of
            each, wishes for what it starts from. values: one for each number, with the geometry of what fills its
            storage. end: stands behind the last call. boundaries: in order, and one behind the last. first: of those
            that somebody is told of.
        num_slots: of tensors; those of held values come after them, parameters last. masks: by its place among the
            saved tensors, the number of the random mask that one shows, which something is rebuilt from. casts: places
            of those that autocast made of a parameter. spots: where to look at parameters that something is rebuilt
            from, by number. apart: see `SavedApart`, by place. constants: parameters (weak).
        is_varied: whether steps of other sizes follow it, see [Note: dynamic shapes].

    Args:
        constants: parameters and the slots they lie in.
        boundaries: in order.
        seen: places of the saved tensors that the hooks are to see; autograd keeps the others as it would without them.
    """

    def __init__(
        self,
        calls: list[ProgramCall],
        saves: list[Saved],
        segments: list[SegmentProgram],
        values: list[Value],
        num_slots: int,
        constants: list[tuple[nn.Parameter, int]],
        masks: dict[int, int] | None = None,
        casts: frozenset[int] = frozenset(),
        seen: frozenset[int] = frozenset(),
        boundaries: Sequence[Boundary] = (),
        apart: dict[int, SavedApart] | None = None,
    ) -> None:
        self.calls = calls
        self.apart = apart or {}
        self.casts = casts
        self.masks = masks or {}
        self.end = ProgramCall(None, None, [])
        for i, call in enumerate([*calls, self.end]):
            call.index = i
            if i:
                calls[i - 1].then = call
        self.num_slots = num_slots
        self._num_other_slots = num_slots + len(values)
        moved = {slot: self._num_other_slots + i for i, (_, slot) in enumerate(constants)}
        for call in calls:
            if not moved.keys().isdisjoint(call.reads):
                call.reads = tuple([moved.get(slot, slot) for slot in call.reads])
        self.end.first_save = self.end.end_save = calls[-1].last_save if calls else 0
        then = self.end
        for call in reversed(calls):
            call.is_hooked = not seen.isdisjoint(range(call.first_save, call.end_save))
            call.stays_hooked = not seen.isdisjoint(range(call.end_save, call.last_save))
            if call.stays_hooked:
                call.is_hooked = True
            if then.is_hooked and then.first_save == call.last_save:  # no idle stretch is between
                call.stays_hooked = True
            then = call
        for call in calls:
            call.follow = follow_code(call)
        self.boundaries = [*boundaries, Boundary(False, num_ops=0, deriving=True, is_watched=True)]
        told = [boundary for boundary in self.boundaries if boundary.is_told]
        self.first = told[0]
        for boundary, next_told in itertools.pairwise(told):
            boundary.then = next_told
        untold: list[str] = []
        for i, boundary in enumerate(self.boundaries):
            boundary.index = i
            if boundary.is_told:
                boundary.untold = frozenset(untold)
                untold.clear()
            elif boundary.path is not None:
                untold.append(str(boundary.path))
        self.saves = saves
        self.segments = segments
        self.values = values
        self.is_varied = False
        self._settle()
        self.constants = [weakref.ref(parameter) for parameter, _ in constants]
        self._guard = _torch.tensor_guard([parameter for parameter, _ in constants]) if constants else None
        self.spots: dict[int, Spots | None] = {}
        self._offsets = [parameter.storage_offset() for parameter, _ in constants]
        self.holders: dict[int, list[int]] = {}
        for i, segment in enumerate(segments):
            for number in segment.sources:
                self.holders.setdefault(number, []).append(i)

    def _settle(self) -> None:
        saves, segments = self.saves, self.segments
        self.wishes = {at: self.wish(n, s, base) for at, (kind, s, n, base) in enumerate(saves) if kind == REBUILD}
        self.packs = [self._pack(at, save) for at, save in enumerate(saves)]
        self.starts = [[self.wish(n, s.around) for n in s.starts] for s in segments]

    def vary(self) -> None:
        """Has steps of other sizes follow it, too: called once its geometries are those of all of them."""
        self.is_varied = True
        self._settle()

    def kept_geometry(self, number: int) -> Any:
        """Returns the geometry of the first saved tensor that a value is kept as, None if it is not."""
        return next((geometry for kind, _, n, geometry in self.saves if n == number and kind == KEEP), None)

    def geometry_at(self, at: int) -> Any:
        """Returns the geometry of a saved tensor, None if that is not known or that of its value."""
        return self.saves[at][3]

    def geometry_of_save(self, save: Saved) -> Any:
        """Returns the geometry of a saved tensor, None if that is not known."""
        kind, _, number, geometry = save
        return self.values[number].base if geometry is None and kind == REBUILD else geometry

    def wish(self, number: int, segment: int, geometry: Geometry | None = None) -> Wish:
        """Returns what is asked for of a value that a segment rebuilds."""
        base = self.values[number].base
        return Wish(number, base, geometry or base, segment, self.segments[segment].lead_of(number))

    def _pack(self, at: int, save: Saved) -> Pack:
        kind, _, number, geometry = save
        if isinstance(geometry, Varied):
            return None
        if at in self.casts or at in self.masks or at in self.apart:
            return None
        if kind == REBUILD:
            return self.wishes[at]
        if kind == CONSTANT:
            return kept_with_its_node
        return kept_simply if number < 0 else None

    def slots(self) -> list[Any] | None:
        """Returns the slots at the beginning of a step: parameters are in theirs. None if they are not as they were."""
        parameters = [*map(operator.call, self.constants)]
        if parameters and (
            id(None) in map(id, parameters)
            or self._guard is None
            or not self._guard(*parameters)
            or [*map(_storage_offset, parameters)] != self._offsets
        ):
            return None
        slots: list[Any] = [None] * self._num_other_slots
        return slots + parameters


def last_uses(saves: list[Saved], segments: list[SegmentProgram]) -> dict[int, int]:
    """Returns, by its place, the last saved tensor that each held value is asked for."""
    found: dict[int, int] = {}
    for at, (kind, index, number, _) in enumerate(saves):
        if kind == KEEP:
            found[number] = at
        elif kind == REBUILD:
            segment = segments[index]
            found.update(dict.fromkeys(segment.lead_of(number), at))
            for start in segment.starts:
                found.update(dict.fromkeys(segments[segment.around].lead_of(start), at))
    found.pop(-1, None)  # tensors without a value
    return found
