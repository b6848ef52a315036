"""Summary of the steps of a watched job: its batches by shape, and the memory of each."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

from recoup.ir import html
from recoup.ir.report import MOST_ROWS
from recoup.ir.text import sparkline
from recoup.units import format_bytes

Shapes = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(slots=True)
class WatchedBatches:
    """Steps on batches of the same shapes.

    Attributes:
        first: number of the first such step, from 1.
        last: number of the last such step, from 1.
        bound_bytes: simulated peak of the smallest simulated batch that covers these shapes.
    """

    shapes: Shapes
    first: int
    last: int
    count: int
    bound_bytes: int


@dataclasses.dataclass(slots=True, repr=False)
class WatchedSteps:
    """The steps of a block of `recoup.watch`, while it runs and afterwards.

    Attributes:
        num_steps: forwards in training so far.
        batches: by shapes, in order of their first step.
        last_bytes: the bound of each of the last steps, as many as a chart draws.
    """

    budget_bytes: int
    num_steps: int = 0
    batches: dict[Shapes, WatchedBatches] = dataclasses.field(default_factory=dict)
    last_bytes: deque[int] = dataclasses.field(default_factory=lambda: deque(maxlen=MOST_ROWS))

    def add(self, shapes: Sequence[tuple[int, ...]], bound_bytes: int) -> None:
        """Notes a step that is about to run."""
        self.num_steps += 1
        key = tuple(shapes)
        seen = self.batches.setdefault(key, WatchedBatches(key, self.num_steps, 0, 0, bound_bytes))
        seen.last, seen.count, seen.bound_bytes = self.num_steps, seen.count + 1, bound_bytes
        self.last_bytes.append(bound_bytes)

    @property
    def peak_bytes(self) -> int:
        """The largest bound of any step so far."""
        return max((b.bound_bytes for b in self.batches.values()), default=0)

    def __repr__(self) -> str:
        return f"<WatchedSteps: {self._title()}>"

    def __str__(self) -> str:
        """The batches, and memory from step to step."""
        lines = [self._title(), f"  {'steps':>7} {'first':>7} {'last':>7} {'at most':>11}  batch"]
        for b in self.batches.values():
            lines.append(
                f"  {b.count:>7} {b.first:>7} {b.last:>7} {format_bytes(b.bound_bytes):>11}  {shapes_text(b.shapes)}"
            )
        if len(set(self.last_bytes)) > 1:
            lines.append(f"  memory from step to step |{sparkline(list(self.last_bytes))}|")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [(shapes_text(b.shapes), b.bound_bytes) for b in self.batches.values()]
        return html.card(
            self._title(), html.bars(rows, self.budget_bytes) if rows else "", html.text(str(self), "steps")
        )

    def _title(self) -> str:
        most = f", at most {format_bytes(self.peak_bytes)}" if self.batches else ""
        steps = f"{self.num_steps} step{'' if self.num_steps == 1 else 's'} watched"
        return f"{steps}{most} of {format_bytes(self.budget_bytes)}"


def shapes_text(shapes: Sequence[tuple[int, ...]]) -> str:
    """Returns the first shapes of a batch, for a message."""
    return ", ".join(str(list(shape)) for shape in shapes[:3])
