"""Tiles of the loss and of position-wise modules: sums in another order, so equal up to rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

from recoup.ir.decision.base import Decision
from recoup.ir.decision.paths import grouped


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile(Decision):
    """Rows that run a tile at a time, forward and backward, so that a tile's tensors are all there is at once."""

    verb: ClassVar[str] = "tile"
    is_exact: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TileLoss(Tile):
    """The head returns logits that are not there, and the loss runs over tiles of them.

    Attributes:
        tile_tokens: rows of a tile; None: as many as `recoup.tiled_cross_entropy` takes by itself.
    """

    action: ClassVar[str] = "tile-loss"

    tile_tokens: int | None = None

    def check(self) -> None:
        """Raises UsageError for an empty tile."""
        self.require_at_least(1, "tile_tokens")

    @classmethod
    def describe(cls, members: Sequence[Self]) -> list[str]:
        """Returns a line for each head."""
        sizes = [f" by {d.tile_tokens} tokens" if d.tile_tokens else "" for d in members]
        return [f"tile {d.path} and its loss{size}" for d, size in zip(members, sizes, strict=True)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TileModule(Tile):
    """A position-wise module runs over tiles of its positions; that it is one is proved when it runs.

    Attributes:
        tile_tokens: positions of a tile.
    """

    action: ClassVar[str] = "tile-module"

    tile_tokens: int

    def check(self) -> None:
        """Raises UsageError for an empty tile."""
        self.require_at_least(1, "tile_tokens")

    @classmethod
    def describe(cls, members: Sequence[Self]) -> list[str]:
        """Returns a line for each size of tile and kind of module."""
        lines = []
        for tokens in dict.fromkeys(d.tile_tokens for d in members):
            paths = [d.path or "(the model)" for d in members if d.tile_tokens == tokens]
            lines += [f"tile {text} by {tokens} tokens" for text in grouped(paths)]
        return lines
