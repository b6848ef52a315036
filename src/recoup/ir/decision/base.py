"""The base of all decisions: the call it is for, its checks, its words, its JSON.

A decision is one action for one call of a module. Each action is a frozen dataclass of its own that derives from
`Decision`: it has the fields that action needs and no others, refuses values out of range, and knows its words.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from recoup.errors import UsageError
from recoup.ir.decision.paths import grouped
from recoup.ir.fields import fits, hints_of, read_fields, said, shown

Ambient = Literal["save", "rederive"]


class _Named(type):
    """Lets `Decision` itself be called with the name of an action: it makes one of that action's class."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        if "action" not in fields:
            return super().__call__(*args, **fields)
        from recoup.ir.decision import read_decision  # late: the classes of the actions derive from the one here

        return read_decision(fields)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision(metaclass=_Named):
    """One action for one call.

    `Decision(path="encoder", action="recompute")` is `Recompute(path="encoder")`.

    A decision holds for everything below its path until a decision of a deeper path takes over: `Rederive(path="")`
    with `Save(path="head")` rederives everywhere but in the head.

    Attributes:
        action: the tag in JSON.
        verb: the word for people.
        is_exact: whether gradients are bit-equal to the plain step's.
        is_whole_step: whether it says what becomes of every saved tensor, and stands alone.
        path: dotted module path; "" is the model itself.
        call: which execution of that module in the step, counted from 0; None: every one.

    Raises:
        UsageError: if a field has the wrong type or is out of range.
    """

    action: ClassVar[str]
    verb: ClassVar[str]
    is_exact: ClassVar[bool] = True
    is_whole_step: ClassVar[bool] = False

    path: str
    call: int | None = None

    def __post_init__(self) -> None:
        kind: Any = type(self)  # hashable, which mypy does not see of a class
        for name, hint in hints_of(kind).items():
            value = getattr(self, name)
            if not fits(value, hint):
                self.refuse(f"{name} must be {said(hint)}; got {shown(value)}")
        if self.path and not all(self.path.split(".")):
            self.refuse(f"path must be module names with single dots between them; got {shown(self.path)}")
        self.require_at_least(0, "call")
        self.check()

    def check(self) -> None:
        """Raises UsageError if fields are out of range; their types are right already."""

    def require_at_least(self, least: int, *names: str) -> None:
        """Raises UsageError if a field that is given is below `least`."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < least:
                self.refuse(f"{name} must be at least {least}; got {value}")

    def refuse(self, why: str) -> typing.NoReturn:
        """Raises UsageError, one line that names the decision."""
        raise UsageError(f"Decision {self.action!r} for {_at(self.path)}: {why}.")

    # -- what others ask of any decision ---------------------------------------------------------------------------

    @property
    def paths(self) -> tuple[str, ...]:
        """The modules whose calls it is about."""
        return (self.path,)

    @property
    def is_region(self) -> bool:
        """Whether it makes calls a region: their forward runs again in backward."""
        return False

    @property
    def below(self) -> Ambient | None:
        """The ambient action below its path; None: it does not change it."""
        return None

    @property
    def rederives(self) -> bool:
        """Whether saved tensors are rebuilt somewhere under it."""
        return self.below == "rederive"

    @property
    def records(self) -> bool:
        """Whether forward's ops are recorded for it."""
        return self.offloads

    @property
    def offloads(self) -> bool:
        """Whether something goes to the host."""
        return False

    def renamed(self, paths: Mapping[str, str]) -> Self:
        """Returns the decision for a model in which modules have other paths, as `paths` says: old to new."""
        return dataclasses.replace(self, path=paths[self.path])

    def holds(self, call: int) -> bool:
        """Whether it is about the call of that number, counted from 0, of its path."""
        return self.call is None or self.call == call

    # -- words -----------------------------------------------------------------------------------------------------

    def words(self) -> str:
        """Returns the action in words, without its place: "recompute through layers.3"."""
        return self.verb

    def words_at(self, path: str) -> str:
        """Returns the action at one of its `paths` in words: "recompute with layers.2"."""
        return self.words() if path == self.path else f"{self.verb} with {self.path}"

    @classmethod
    def kinds(cls, members: Sequence[Self]) -> list[list[Self]]:
        """Returns decisions of this class in groups that do one thing together: what `explain` takes away at a time."""
        return [list(members)]

    @classmethod
    def describe(cls, members: Sequence[Self]) -> list[str]:
        """Returns decisions of this class in words, equal layers in one line."""
        return [f"{cls.verb} {text}" for text in grouped([d.path or "(the model)" for d in members])]

    # -- JSON ------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data: the tag, then the fields."""
        return {"action": self.action, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Reads what `to_json` returned; fields with a default may be missing.

        Raises:
            UsageError: for an unknown field, a missing one, or a value that does not fit.
        """
        given = {name: cls.read_field(name, v) for name, v in data.items() if name != "action"}
        where = f"Decision {cls.action!r} for {_at(data.get('path', '?'))}"
        return read_fields(cls, given, where)

    @classmethod
    def read_field(cls, name: str, value: Any) -> Any:
        """Returns a field's value from plain JSON data: lists become tuples."""
        return tuple(value) if isinstance(value, list) else value


def _at(path: Any) -> str:
    return f"`{path}`" if isinstance(path, str) and path.isprintable() and len(path) < 200 else shown(path)
