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

    @property
    def records(self) -> bool:
        """For the model itself: inputs of regions may be rebuilt then."""
        return not self.path

    @classmethod
    def kinds(cls, members: Sequence[Self]) -> list[list[Self]]:
        """Returns "": save is no choice but the default."""
        return []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rederive(Decision):
    """Saved tensors that cheap ops made are dropped, and rebuilt when backward unpacks them.

    Frees activations, norms' outputs, masks; no matmul and no attention runs twice.
    """

    action: ClassVar[str] = "rederive"
    verb: ClassVar[str] = "rederive"

    @property
    def below(self) -> Ambient:
        """Saved tensors are rebuilt."""
        return "rederive"

    @property
    def records(self) -> bool:
        """They are rebuilt from the record."""
        return True
