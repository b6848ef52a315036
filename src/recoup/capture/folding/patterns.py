"""Patterns of a folded loop: the ops of an executed call, with storages named relative to the call.

A storage that a call makes is named by the call and a number; one that is made between two calls belongs to the gap
after the first. In a *relative* recording every storage is one of three: the call's own, one of a call (or gap) that
is a fixed number of calls away, or the same storage in every call.

Example: in `h = cell(x[t], h)`, call 7 reads `h` of call 6. Relative to the call that is ("at", "F", path, -1, n), so
that call 8 has the same pattern.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from recoup.capture.folding.observed import Block
from recoup.ir.trace import Signature

Key = tuple[str, str, int]  # kind ("F", "B": forward and backward of a call; "gF", "gB": the ops after it), path, call
Name = tuple[str, str, int, int]  # the key and a number
Ref = tuple[Any, ...]  # ("own", n), ("at", kind, path, calls away, n) or ("same", storage)


@dataclasses.dataclass(slots=True)
class Segment:
    """A consecutive range of the recording: a call, or the ops between two calls."""

    key: Key
    block: Block | None
    ops: tuple[int, int]
    storages: tuple[int, int]
    saves: tuple[int, int] = (0, 0)
    links: tuple[int, int] = (0, 0)
    rederived: int = 0


@dataclasses.dataclass(slots=True)
class Pattern:
    """A relative recording.

    Attributes:
        ops: (signature, phase, replayed, call, origin, inputs, outputs, begins_call, sums); calls and origins
            relative to the call's.
        births: (bytes, category, label, op, op at which it is freed; None: not within this call).
        deaths: (storage, op) of storages made elsewhere.
        saves: (ops so far, call, storage, distance back to the op that saves it).
        writes: (op, storage).
        calls: calls of submodules inside the call.
        inputs: storages of its arguments and of the state it reads.
        given: indices of the results that got a gradient.
    """

    ops: list[tuple[Any, ...]]
    births: list[tuple[int, str, str, int, int | None]]
    deaths: list[tuple[Ref, int]]
    saves: list[tuple[int, int, Ref, int]]
    writes: list[tuple[int, Ref]]
    links: list[tuple[int, tuple[Ref, ...]]]
    random: list[int]
    calls: list[tuple[Any, ...]]
    inputs: tuple[Ref, ...]
    rederived: int
    given: tuple[bool, ...] | None

    def reaches_back(self, period: int) -> bool:
        """Whether it reads storages that the backward of a call more than a period away made."""
        refs = {ref for op in self.ops for ref in op[5]}
        return any(ref[0] == "at" and ref[1] == "B" and ref[3] > period for ref in refs)


@dataclasses.dataclass(slots=True)
class Copied:
    """A pattern prepared for being written many times: the distinct references, and ops that name them by number."""

    refs: list[Ref]
    ops: list[tuple[Any, ...]]
    read: tuple[int, ...]
    deaths: list[tuple[int, int]]
    saves: list[tuple[int, int, int, int]]
    writes: list[tuple[int, int]]
    links: list[tuple[int, tuple[int, ...]]]

    @classmethod
    def of(cls, pattern: Pattern) -> Copied:
        """Returns the prepared form of a pattern."""
        numbers: dict[Ref, int] = {}

        def count(refs: Any) -> tuple[int, ...]:
            return tuple(numbers.setdefault(ref, len(numbers)) for ref in refs)

        def one(ref: Ref) -> int:
            return numbers.setdefault(ref, len(numbers))

        ops = [(*op[:5], count(op[5]), count(op[6]), *op[7:]) for op in pattern.ops]
        return cls(
            ops=ops,
            read=tuple({number for op in ops for number in op[5]}),
            deaths=[(one(ref), at) for ref, at in pattern.deaths],
            saves=[(at, call, one(ref), before) for at, call, ref, before in pattern.saves],
            writes=[(op, one(ref)) for op, ref in pattern.writes],
            links=[(op, count(refs)) for op, refs in pattern.links],
            refs=list(numbers),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Stepping:
    """A signature with integers that grow linearly with the call's index, such as the offset of a step's slice."""

    one: Signature
    other: Signature
    at: int
    away: int

    def step(self, index: int) -> Signature:
        """Returns the signature in the given call."""

        def value(a: Any, b: Any) -> Any:
            if isinstance(a, tuple):
                return tuple(value(x, y) for x, y in zip(a, b, strict=True))
            return a if a == b else a + (index - self.at) * (b - a) // self.away

        return dataclasses.replace(
            self.one, args=value(self.one.args, self.other.args), kwargs=value(self.one.kwargs, self.other.kwargs)
        )

    def is_even(self) -> bool:
        """Whether the two signatures differ in nothing but integers."""

        def is_alike(a: Any, b: Any) -> bool:
            if isinstance(a, tuple):
                return isinstance(b, tuple) and len(a) == len(b) and all(map(is_alike, a, b))
            return a == b or (type(a) is type(b) is int and (b - a) % self.away == 0)

        one, other = self.one, self.other
        return (
            is_alike(one.args, other.args)
            and is_alike(one.kwargs, other.kwargs)
            and dataclasses.replace(one, args=(), kwargs=()) == dataclasses.replace(other, args=(), kwargs=())
        )
