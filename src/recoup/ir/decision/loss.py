"""The loss in place: a cross entropy that keeps one copy of its logits, bit for bit the plain one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

from recoup.ir.decision.base import Decision


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossInPlace(Decision):
    """Cross entropies in the model's own forward take a few rows of logits at a time; nothing runs in another order.

    Plainly the log-probabilities are kept beside the logits, and backward makes two tensors more of their size. Here
    the logits alone are kept, and their gradient is written over them where nobody else holds them.

    Attributes:
        rows: of logits at a time.
    """

    action: ClassVar[str] = "loss-in-place"
    verb: ClassVar[str] = "loss in place"

    rows: int

    def check(self) -> None:
        """Raises UsageError if it is about a part of the model, about one call, or about no rows."""
        self.require_at_least(1, "rows")
        if self.path or self.call is not None:
            self.refuse("it is about the whole step: path is empty and call is nothing")

    @classmethod
    def describe(cls, members: Sequence[Self]) -> list[str]:
        """Returns a line."""
        return [f"take the loss {d.rows} rows at a time, its gradient in place of the logits" for d in members]
