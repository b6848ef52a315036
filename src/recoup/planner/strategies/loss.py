"""Loss in place: what every plan may have besides, and a plan by itself where it is enough."""

from __future__ import annotations

from typing import ClassVar, Self

from recoup.planner.step import PlannedStep
from recoup.planner.strategies.base import Decisions, Strategy


class LossStrategy(Strategy):
    """The model's cross entropies keep one copy of their logits. Other strategies add it to their plans."""

    actions: ClassVar[tuple[str, ...]] = ("loss-in-place",)

    def __init__(self, step: PlannedStep) -> None:
        self._step = step

    @classmethod
    def make(cls, step: PlannedStep) -> Self | None:
        """Returns the strategy if it was asked for; steps of scans have plans of their own."""
        return cls(step) if step.simulator.takes_loss_in_place else None

    def opening(self) -> Decisions:
        """Returns it by itself: nothing runs again but the log-probabilities."""
        return self._step.simulator.base[0]

    def why_not_tried(self) -> dict[str, str]:
        """Says so where the model takes no loss of enough logits."""
        if self._step.simulator.base[0]:
            return {}
        return {
            "loss-in-place": "the model's forward takes no cross entropy of large logits, or not of the common form"
        }
