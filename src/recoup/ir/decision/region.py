"""Recompute and loop: calls that keep their inputs and run again in backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar, Self

from recoup.ir.decision.base import Ambient, Decision
from recoup.ir.decision.paths import ranges, shape_of, tail


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Region(Decision):
    """A call, or several that follow each other, whose forward runs again in backward; only its inputs are kept.

    Attributes:
        inside: what the replay does with the tensors that autograd saves in it.
        buffers: paths of buffers that the first forward was seen to change; the replay runs on copies of what they
            were. (Those of normalisation layers the engine finds by itself as well; exports are told by the plan.)
        keep: ops whose results are kept, so that the replay need not run them: "attention", "matmul:KxN" by the shape
            of the right factor, "convolution:..." by that of the weight.
        offload: whether the inputs that are kept go to the host.
    """

    verb: ClassVar[str] = "recompute"

    inside: Ambient = "save"
    buffers: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    offload: bool = False

    @property
    def is_region(self) -> bool:
        """It does."""
        return True

    @property
    def calls_at_a_time(self) -> int:
        """How many calls of its module are one region."""
        return 1

    @property
    def below(self) -> Ambient:
        """What the replay does with its saved tensors."""
        return self.inside

    @property
    def offloads(self) -> bool:
        """Whether its inputs go to the host."""
        return self.offload

    def renamed(self, paths: Mapping[str, str]) -> Self:
        """Returns the decision for a model in which modules have other paths, as `paths` says: old to new."""
        owners = [name.rpartition(".") for name in self.buffers]
        buffers = tuple(f"{paths[owner]}.{leaf}" if owner else leaf for owner, _, leaf in owners)
        return dataclasses.replace(self, path=paths[self.path], buffers=buffers)

    def words(self) -> str:
        """Returns the action in words, without its place."""
        how = self._reach("")
        how += " (rederiving inside)" if self.inside == "rederive" else ""
        how += f", keeping {', '.join(self.keep)}" if self.keep else ""
        how += self._pace()
        return f"recompute{how}" + (", inputs offloaded" if self.offload else "")

    def _reach(self, beside: str) -> str:
        """Returns through which module it goes, without what that path shares with `beside`."""
        return ""

    def _pace(self) -> str:
        """Returns how many calls run at a time."""
        return ""

    def _key(self) -> Hashable:
        """Returns what regions of one kind share."""
        return self.inside, self.offload, self.keep, tuple(shape_of(p) for p in self.paths)

    @classmethod
    def kinds(cls, members: Sequence[Self]) -> list[list[Self]]:
        """Returns regions of equal layers together."""
        groups: dict[Hashable, list[Self]] = {}
        for region in members:
            groups.setdefault(region._key(), []).append(region)
        return list(groups.values())

    @classmethod
    def describe(cls, members: Sequence[Self]) -> list[str]:
        """Returns a line for each kind of region."""
        lines = []
        for same in cls.kinds(members):
            first = same[0]
            text = ranges([d.path or "(the model)" for d in same])
            reach = first._reach(first.path)
            text += f" each{reach}" if reach and len(same) > 1 else reach
            text += first._pace()
            text += " (rederiving inside)" if first.inside == "rederive" else ""
            text += f", keeping {', '.join(first.keep)}" if first.keep else ""
            text += ", inputs offloaded" if first.offload else ""
            lines.append(f"recompute {text}")
        return lines


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recompute(Region):
    """A call as a region, or consecutive calls as one.

    Attributes:
        span: paths of the calls that follow directly and belong to the same region.
    """

    action: ClassVar[str] = "recompute"

    span: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Its own call's module and those of its span."""
        return (self.path, *self.span)

    def renamed(self, paths: Mapping[str, str]) -> Self:
        """Returns the decision for a model in which modules have other paths, as `paths` says: old to new."""
        return dataclasses.replace(Region.renamed(self, paths), span=tuple(paths[p] for p in self.span))

    def _reach(self, beside: str) -> str:
        return f" through {tail(beside, self.span[-1])}" if self.span else ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop(Region):
    """A module that is called once a time step: every `chunk` consecutive calls are one region.

    Of n calls n / chunk states are kept, and one chunk's saved tensors while it is replayed.

    Attributes:
        chunk: how many calls make one region.
        calls: only so many calls, from the first; None: all.
    """

    action: ClassVar[str] = "loop"

    chunk: int
    calls: int | None = None

    @property
    def calls_at_a_time(self) -> int:
        """As many as a chunk has."""
        return self.chunk

    def check(self) -> None:
        """Raises UsageError if there are no calls to chunk, or it is about a single one."""
        self.require_at_least(1, "chunk", "calls")
        if self.call is not None:
            self.refuse(f"it is about all calls of its module, not about one; got call={self.call}")

    def holds(self, call: int) -> bool:
        """Whether the call of that number is among those that are chunked."""
        return self.calls is None or call < self.calls

    def _pace(self) -> str:
        return f", {self.chunk} calls at a time" + (f", the first {self.calls} calls" if self.calls else "")

    def _key(self) -> Hashable:
        return self.chunk, self.calls, self.inside, self.offload, self.keep, shape_of(self.path)
