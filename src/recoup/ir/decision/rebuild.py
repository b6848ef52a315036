"""Rebuild: a plan by tensor, whatever module the code lies in."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from recoup.errors import UsageError
from recoup.ir.decision.base import Ambient, Decision
from recoup.ir.decision.paths import grouped, listed
from recoup.ir.fields import fits, hints_of, said, shown
from recoup.ir.labels import method_key


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpMark:
    """The choice at one op of the forward.

    Attributes:
        path: dotted path of the module whose own code dispatches the op ("" is the model).
        call: which call of that module in the step, from 0; in that call from outside that it is part of.
        entry: the call from outside of any other that the op is part of, by its `Entry.key` ("" is the model's).
        ordinal: which op of that call, from 0, of those that read tensors of floating-point or complex numbers and
            are no views; ops of modules called inside do not count.
        op: its name, "aten.mm.default": where another op stands there, the mark means nothing.
        holds: its results are held for backward.
        stays: what autograd saves of its results stays where it is, and nothing is rebuilt from it: it is a part of a
            storage whose other parts are written later.
        begins_segment: a new segment begins with it.
        saves: with `begins_segment`, all that autograd saves in the segment is held; nothing of it is rebuilt.
        begins_piece: a new piece of the segment begins with it: the segment is rebuilt once to what its pieces start
            from, then piece by piece.
        is_joint: its results are held for the pieces from the first rebuild on.
    """

    path: str
    call: int
    ordinal: int
    op: str
    holds: bool = False
    stays: bool = False
    begins_segment: bool = False
    saves: bool = False
    begins_piece: bool = False
    is_joint: bool = False
    entry: str = ""

    @property
    def begins(self) -> bool:
        """Whether something begins with it."""
        return self.begins_segment or self.begins_piece

    def __post_init__(self) -> None:
        _check_fields(self, "A mark")
        if min(self.call, self.ordinal) < 0:
            raise UsageError(f"A mark counts calls and ops from 0; got {self.call} and {self.ordinal}.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the step calls from outside of any other call: the model or one of its parts, or a method of either.

    Attributes:
        path: dotted path of the module ("" is the model).
        method: the method's name; "" is forward.
        input_numel: elements of the tensors that it is called with there, the fewest where it is called again: what is
            too small to be rebuilt is smaller yet in a step of fewer. 0: not known.
    """

    path: str = ""
    method: str = ""
    input_numel: int = 0

    def __post_init__(self) -> None:
        _check_fields(self, "An entry")

    @property
    def key(self) -> str:
        """What marks call it: "encoder", "encoder.embed()"."""
        return method_key(self.path, self.method) if self.method else self.path


def _check_fields(item: Any, what: str) -> None:
    """Raises UsageError if a field is not of its type."""
    kind: Any = type(item)  # hashable, which mypy does not see of a class
    for name, hint in hints_of(kind).items():
        if not fits(getattr(item, name), hint):
            raise UsageError(f"{what}'s {name} must be {said(hint)}; got {shown(getattr(item, name))}.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild(Decision):
    """Of what autograd saves only marked results are held; the rest is rebuilt by running the recorded ops again.

    Saved tensors of a segment are rebuilt together, on the first that backward asks for: each op that is needed runs
    once. Frees what lies between two held results; costs the ops that lead to it. No Python of the model runs twice.

    Attributes:
        marks: in the order of the forward.
        num_saved: how many tensors autograd saves in the planned forward; a step that saves another number went
            another way. None: not known.
        entries: the calls it is about, and what they call; what the step runs outside of them is as it was.
    """

    action: ClassVar[str] = "rebuild"
    verb: ClassVar[str] = "rebuild"
    is_whole_step: ClassVar[bool] = True

    marks: tuple[OpMark, ...] = ()
    num_saved: int | None = None
    entries: tuple[Entry, ...] = (Entry(),)

    @property
    def below(self) -> Ambient:
        """Saved tensors are rebuilt."""
        return "rederive"

    @property
    def records(self) -> bool:
        """They are rebuilt from the record."""
        return True

    @property
    def paths(self) -> tuple[str, ...]:
        """The module it is in, those that it enters, and those whose ops are marked."""
        return tuple(dict.fromkeys([self.path, *(e.path for e in self.entries), *(m.path for m in self.marks)]))

    @property
    def num_segments(self) -> int:
        """How many segments are rebuilt."""
        return sum(m.begins_segment and not m.saves for m in self.marks)

    def check(self) -> None:
        """Raises UsageError if it is about a part of the model, or about one call."""
        if self.path or self.call is not None:
            self.refuse("it is about the whole step: path is empty and call is nothing")
        unknown = {mark.entry for mark in self.marks} - {entry.key for entry in self.entries}
        if unknown:
            self.refuse(f"a mark is in `{min(unknown)}`, which is none of its entries")

    def renamed(self, paths: Mapping[str, str]) -> Self:
        """Returns the decision for a model in which modules have other paths, as `paths` says: old to new."""
        entries = tuple(dataclasses.replace(e, path=paths[e.path]) for e in self.entries)
        keys = {old.key: new.key for old, new in zip(self.entries, entries, strict=True)}
        marks = tuple(dataclasses.replace(m, path=paths[m.path], entry=keys[m.entry]) for m in self.marks)
        return dataclasses.replace(self, path=paths[self.path], marks=marks, entries=entries)

    def words(self) -> str:
        """Returns the action in words, without its place."""
        return f"rebuild in {self._segments()}"

    def _segments(self) -> str:
        num = self.num_segments
        return f"{num} segment{'s' * (num != 1)}"

    def words_at(self, path: str) -> str:
        """Returns what a module's own ops do, in words: "rebuild, holding mm, add (x2)"."""
        held = Counter(m.op.split(".")[1] for m in self.marks if m.holds and m.path == path)
        names = [f"{name} (x{num})" if num > 1 else name for name, num in held.items()]
        how = self.words() if path == self.path else self.verb
        return how + (f", holding {listed(names)}" if names else "")

    @classmethod
    def describe(cls, members: Sequence[Self]) -> list[str]:
        """Returns a line for the segments and one for each kind of module whose ops' results are held."""
        lines = []
        for decision in members:
            num_pieces = sum(m.begins_piece for m in decision.marks)
            pieces = f", some of them in {num_pieces} pieces" if num_pieces else ""
            keys = [entry.key or "the model" for entry in decision.entries]
            inside = f" of {listed(keys)}" if any(entry.key for entry in decision.entries) else ""
            lines.append(f"rebuild by running ops again, in {decision._segments()}{inside}{pieces}")
            ops: dict[str, dict[str, None]] = {}
            for mark in decision.marks:
                if mark.holds:
                    ops.setdefault(mark.path or "the model's own code", {})[mark.op.split(".")[1]] = None
            held: dict[tuple[str, ...], list[str]] = {}
            for path, names in ops.items():
                held.setdefault(tuple(names), []).append(path)
            for kinds, where in held.items():
                lines += [f"hold {listed(kinds)} in {text}" for text in grouped(where)]
        return lines

    @classmethod
    def read_field(cls, name: str, value: Any) -> Any:
        """Returns a field's value from plain JSON data.

        Raises:
            UsageError: if `marks` or `entries` are none.
        """
        kind = {"marks": OpMark, "entries": Entry}.get(name)
        if kind is None:
            return value
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise UsageError(f"Decision 'rebuild': {name} must be a list; got {shown(value)}.")
        fields = dataclasses.fields(kind)
        known, needed = {f.name for f in fields}, {f.name for f in fields if f.default is dataclasses.MISSING}
        for item in value:
            if not isinstance(item, dict) or not needed <= item.keys() <= known:
                raise UsageError(
                    f"Decision 'rebuild': each of {name} has the fields {', '.join(sorted(known))}; got {shown(item)}."
                )
        return tuple(kind(**item) for item in value)
