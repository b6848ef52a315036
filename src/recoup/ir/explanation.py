"""Why a plan is what it is: what each of its choices is worth, and what other budgets would cost. Plain data."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one kind of choice is worth: the plan against the same plan without it, both simulated.

    Attributes:
        choice: in model terms, e.g. `recompute model.layers.0-7`.
        freed_peak_bytes: by how much the step's peak falls. freed_saved_bytes: by how much less autograd holds when
            backward begins. extra_seconds: what it adds to a step.
    """

    choice: str
    freed_peak_bytes: int
    freed_saved_bytes: int
    extra_seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Saved bytes freed for each second of second runs; infinite where it costs nothing."""
        return self.freed_saved_bytes / self.extra_seconds if self.extra_seconds > 0 else float("inf")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trade:
    """Two plans for one step, and what lies between them.

    Attributes:
        from_bytes, to_bytes: their predicted peaks. from_seconds, to_seconds: their predicted seconds a step.
        to_does: what the second one does, a line each.
    """

    from_bytes: int
    to_bytes: int
    from_seconds: float
    to_seconds: float
    to_does: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Seconds a step that the change costs; negative where it saves them."""
        return self.to_seconds - self.from_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why this plan.

    Attributes:
        peak_bytes: predicted, with the phase where it is and the largest `tensors` there as (what, bytes).
        step_seconds, plain_step_seconds: predicted.
        prices: one for each kind of choice, the dearest second last.
        less, more: what the next `step_bytes` fewer would cost and as many more would buy; None where no plan is
            that small, or the plain step fits already.
        cost_source: where seconds come from.
    """

    peak_bytes: int
    phase: str
    tensors: tuple[tuple[str, int], ...]
    step_seconds: float
    plain_step_seconds: float
    prices: tuple[Price, ...]
    step_bytes: int
    less: Trade | None
    more: Trade | None
    cost_source: str

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        from recoup.report.explanation import format_explanation  # report/ stands above ir/: only needed to print

        return format_explanation(self)
