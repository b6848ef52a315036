"""Save and rederive: what happens to saved tensors from a path down."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

from recoup.ir.decision.base import Ambient, Decision


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Save(Decision):
    """What autograd saves is saved, as in the plain step: costs no time, frees no memory."""

    action: ClassVar[str] = "save"
    verb: ClassVar[str] = "save"

    @property
    def below(self) -> Ambient:
        """Saved tensors are saved."""
        return "save"

    @classmethod
    def kinds(cls, members: Sequence[Self]) -> list[list[Self]]:
        """Returns nothing: saving is what is left when a choice is taken away."""
        return []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rederive(Decision):
    """Saved tensors that cheap ops made are dropped, and rebuilt when backward asks for them.

    Frees activations, norms' outputs, masks; no matmul and no attention runs twice.
    """

    action: ClassVar[str] = "rederive"
    verb: ClassVar[str] = "rederive"

    @property
    def below(self) -> Ambient:
        """Saved tensors are rebuilt."""
        return "rederive"
