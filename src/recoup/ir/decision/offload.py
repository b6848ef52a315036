"""Offload: what autograd saves in a call goes to the host, and back before backward reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

from recoup.ir.decision.base import Ambient, Decision
from recoup.ir.decision.paths import grouped


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offload(Decision):
    """What is saved from here down moves to host memory; costs link time where copies do not hide behind compute.

    Attributes:
        inside: what happens to saved tensors first; with "rederive" only what cannot be rebuilt is moved.
    """

    action: ClassVar[str] = "offload"
    verb: ClassVar[str] = "offload"

    inside: Ambient = "save"

    @property
    def below(self) -> Ambient:
        """What happens to saved tensors first."""
        return self.inside

    @property
    def offloads(self) -> bool:
        """It does."""
        return True

    @classmethod
    def describe(cls, members: Sequence[Self]) -> list[str]:
        """Returns a line for each kind of module."""
        lines = []
        for inside, left in (("save", ""), ("rederive", ", but what rederives")):
            moved = [d.path or "(the model)" for d in members if d.inside == inside]
            lines += [f"offload what is saved in {text}{left}" for text in grouped(moved)]
        return lines
