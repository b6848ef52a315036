"""How many tokens a card takes: the longest sequence, and the most examples of shorter ones. Plain data."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """The largest batches of a model in a budget: of each length one more does not fit (or is over the limit).

    Attributes:
        longest_tokens: the longest sequence that fits alone, a multiple of `multiple_of`.
        limit_tokens: the most tokens that were tried.
        batches: (tokens of an example, number of examples), the longest first.
    """

    longest_tokens: int
    multiple_of: int
    limit_tokens: int
    batches: tuple[tuple[int, int], ...]

    @property
    def most_tokens(self) -> int:
        """Tokens of the batch with most of them."""
        return max(length * examples for length, examples in self.batches)

    def to_json(self) -> dict[str, Any]:
        """Returns what `json` can write."""
        return {**dataclasses.asdict(self), "most_tokens": self.most_tokens}

    def __str__(self) -> str:
        """The longest sequence, then a line a length."""
        is_limit = self.longest_tokens + self.multiple_of > self.limit_tokens
        why = "no more were tried" if is_limit else f"{self.multiple_of:,} more do not fit"
        lines = [f"Longest sequence: {self.longest_tokens:,} tokens (batch 1; {why})"]
        for length, examples in self.batches:
            lines.append(f"  {examples:,} x {length:,} = {length * examples:,} tokens")
        return "\n".join([*lines, f"Most tokens: {self.most_tokens:,}"])
