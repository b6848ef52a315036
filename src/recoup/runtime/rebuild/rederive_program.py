"""The program of a step under a plan that only rederives, and what follows it.

The rules are those of [Note: step programs]; each saved tensor is rebuilt by itself (`derived.py`), not in segments.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from recoup import _torch
from recoup.runtime.rebuild.derived import Derivation, Derived, NumberedOp, Rebuilding
from recoup.runtime.rebuild.dynamic_shapes import Varied
from recoup.runtime.rebuild.kept import Kept, kept_simply, kept_with_its_node
from recoup.runtime.rebuild.saved_apart import SavedApart
from recoup.runtime.rebuild.saved_tensor import compact, pack
from recoup.runtime.rebuild.step_program import CONSTANT, KEEP, REBUILD, Boundary, ProgramCall, StepProgram, parts_of
from recoup.runtime.rebuild.step_run import StepRun
from recoup.runtime.rebuild.values import Geometry, Value, geometry_of

_num_function_modes = _torch.num_function_modes  # asked for every saved tensor
Compact = tuple[int, torch.dtype, Geometry]
Save = tuple[int, int, Geometry, tuple[int, ...]]  # what becomes of it, number of the value, geometry, sources
_Way = Save | Callable[[torch.Tensor], Any] | None


class _Known(Value):
    """A value of a step that follows a program."""


class RederiveProgram(StepProgram):
    """What a step did.

    Attributes:
        kept: what became of each saved tensor. ways: the same, ready for the hook: a function where nobody else asks
            for what is kept, None for what takes a closer look. bases: how values lay, by number.
        rebuilding: how they are rebuilt.
        compacts: what is kept in fewer bytes, by the place of the saved tensor that has it: number, dtype and base.
    """

    def __init__(
        self,
        calls: list[ProgramCall],
        kept: list[Save],
        values: dict[Value, int],
        ops: dict[int, NumberedOp],
        compacts: dict[int, Compact],
        num_slots: int,
        constants: list[tuple[nn.Parameter, int]],
        casts: frozenset[int],
        seen: frozenset[int],
        boundaries: Sequence[Boundary],
        apart: dict[int, SavedApart],
    ) -> None:
        super().__init__(calls, [], [], [], num_slots, constants, None, casts, seen, boundaries, apart)
        self.compacts = compacts
        self.bases = {number: value.base for value, number in values.items()}
        self.kept = kept
        self.ways: list[_Way] = [
            kept_with_its_node if save[0] == CONSTANT else kept_simply if save[1] < 0 else save for save in kept
        ]
        for at in (*casts, *compacts, *apart):
            self.ways[at] = None
        turns = list(itertools.accumulate([kind != CONSTANT for kind, *_ in kept]))
        saved = {i: (number, sources) for i, (kind, number, _, sources) in enumerate(kept) if kind == REBUILD}
        fixed = frozenset([number for value, number in values.items() if value.constant is not None])
        narrow = frozenset([number for number, *_ in compacts.values()])
        known = {number: base for number, base in self.bases.items() if base is not None}
        self.rebuilding = Rebuilding(ops, saved, turns, known, fixed, narrow)

    def vary(self) -> None:
        """Has steps of other sizes follow it, too."""
        super().vary()
        for at, (kind, number, geometry, _) in enumerate(self.kept):
            if isinstance(geometry, Varied) and (number >= 0 or kind == REBUILD):
                self.ways[at] = None

    def kept_geometry(self, number: int) -> Any:
        """Returns the geometry of the first saved tensor that a value is kept as, None if it is not."""
        return next((geometry for kind, n, geometry, _ in self.kept if n == number and kind == KEEP), None)

    def geometry_at(self, at: int) -> Any:
        """Returns the geometry of a saved tensor, None if that is not known."""
        return self.kept[at][2]


class RederiveRun(StepRun):
    """Follows a program through a step."""

    __slots__ = ("_bases", "_compacts", "_derivation", "_saves", "_values", "_ways")

    def __init__(self, program: RederiveProgram, slots: list[Any], recorder: Any) -> None:
        super().__init__(program, slots, recorder)
        self._values: dict[int, _Known] = {}
        self._saves = program.kept
        self._ways = program.ways
        self._compacts = program.compacts
        self._bases = program.bases
        self._derivation = Derivation(program.rebuilding, self.constants, self._under, self.noted)

    def next_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> ProgramCall | None:
        """Returns the call that is about to run if it is the program's next; else None, and the program is over."""
        call = super().next_call(func, args, kwargs)
        if call is not None and call.binds and self._is_known(call, parts_of(args, kwargs)[0]):
            return None
        return call

    def reads_constant(self, number: int, tensor: torch.Tensor) -> bool:
        """Notes a parameter that something is rebuilt from, or what is a view of one; whether that can be."""
        if not super().reads_constant(number, tensor):
            return False
        value = self._values[number] = _Known()
        value.constant = constant = self.constants[number]
        self._recorder.set_value(constant.tensor, value)
        return True

    def meets(self, call: ProgramCall, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a call's tensors, of which some are new to the step, are as they were."""
        return super().meets(call, tensors) and not self._is_known(call, tensors)

    def _is_known(self, call: ProgramCall, handed: Sequence[torch.Tensor]) -> bool:
        """Whether a tensor that should be new to the step lies over memory that something is rebuilt from."""
        tensors = handed if call.form is None else list({id(t): t for t in handed}.values())
        return any(
            slot < 0 and type(self._recorder.existing(tensor)) is _Known
            for tensor, slot in zip(tensors, call.reads, strict=True)
        )

    def pack(self, recorder: Any, tensor: torch.Tensor) -> Any | None:
        """Returns what autograd gets instead of a tensor; None if the program has nothing saved here."""
        at = self.num_saved
        if self.is_other(at, recorder, tensor):
            recorder.stop_program()
            return None
        how = self._ways[at]
        if how is None:
            how = self._saves[at]
            compact_one = self._compacts.get(at)
            if compact_one is not None:
                _, dtype, base = compact_one
                if isinstance(base, Varied):
                    base = (*geometry_of(tensor)[:3], base.dtype)
                source = compact(tensor, dtype, base)  # held below by what is rebuilt from it
                self._known(compact_one[0]).kept = weakref.ref(source)
                recorder.set_value(tensor, self._known(how[1]))
        if isinstance(how, tuple):
            kind, number, geometry, sources = how
            if isinstance(geometry, Varied):
                how = kind, number, geometry_of(tensor), sources
            return self._pack_value(at, how, tensor)
        self.num_saved = at + 1
        return how(tensor)

    def hook(self, tensor: torch.Tensor) -> Any:
        """The pack hook of a step that follows a program: `saved_tensor.pack` by a shorter way."""
        at = self.num_saved
        if at >= self.end or _num_function_modes():
            return pack(tensor)
        how = self._ways[at]
        if isinstance(how, tuple):
            return self._pack_value(at, how, tensor)
        if how is None:
            packed = self.pack(self._recorder, tensor)
            return pack(tensor) if packed is None else packed
        self.num_saved = at + 1
        return how(tensor)

    def _pack_value(self, at: int, save: Save, tensor: torch.Tensor) -> Any:
        """Returns what autograd gets for a tensor whose value has a number."""
        self.num_saved = at + 1
        kind, number, geometry, sources = save
        values = self._values
        value = values.get(number)
        if value is None:
            value = self._known(number)
            self._recorder.set_value(tensor, value)
        elif value.kept is not None and kind == KEEP and (kept := value.alive()) is not None:
            return kept.saved_as(geometry)
        if kind == REBUILD:
            found = []
            for source in sources:
                known = values.get(source)
                kept = None if known is None else known.alive()
                if kept is None:
                    break
                found.append(kept)
            else:
                return Derived(self._derivation, at, number, value, geometry, found)
        kept = Kept(tensor)
        value.kept = weakref.ref(kept)
        return kept

    def _known(self, number: int) -> _Known:
        value = self._values.get(number)
        if value is None:
            value = self._values[number] = _Known()
            base = self._bases[number]
            value.base = None if isinstance(base, Varied) else base
        return value

    def end_early(self, recorder: Any) -> None:
        """Ends the program before its time: the record knows what was saved."""
        self.is_on, self.end = False, -1
        recorder.turn += self.num_saved
        if not any(settings.state.counts_calls for settings in recorder.inside):
            recorder.deriving = rederives_in(recorder.inside, by_default=recorder.deriving)


def rederives_in(inside: Sequence[Any], *, by_default: bool) -> bool:
    """Whether what is saved in modules with these settings, one in the other, may be rederived."""
    decided = [decision for settings in inside if (decision := settings.decide(0)) is not None]
    return bool(decided[-1].rederives) if decided else by_default
