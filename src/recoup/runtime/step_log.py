"""Counts of recoup's events while steps run, for one plan, on all threads.

On a GPU backward runs on another thread. So objects that count there (a region's frame, a rebuilt saved tensor) keep a
reference to the counts of the thread that ran forward.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Literal

Event = Literal["num_replays", "num_rederived", "num_tiled", "num_logits_made", "num_scan_evaluations"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """Counts of events so far; the difference of two logs is the events between them.

    Attributes:
        num_replays: regions that were replayed.
        num_rederived: saved tensors that were rebuilt.
        num_tiled: losses and modules run over tiles.
        num_logits_made: tiled heads whose logits were computed whole.
        num_scan_evaluations: step evaluations of scans whose bytes a plan decides, forward and backward together.
    """

    num_replays: int = 0
    num_rederived: int = 0
    num_tiled: int = 0
    num_logits_made: int = 0
    num_scan_evaluations: int = 0

    def __sub__(self, before: StepLog) -> StepLog:
        names = [field.name for field in dataclasses.fields(self)]
        return StepLog(**{name: getattr(self, name) - getattr(before, name) for name in names})


class Counts:
    """Counts that several threads add to."""

    __slots__ = ("_lock", "_numbers")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[Event, int] = {}

    def add(self, event: Event, number: int = 1) -> None:
        """Counts events."""
        with self._lock:
            self._numbers[event] = self._numbers.get(event, 0) + number

    @property
    def log(self) -> StepLog:
        """The counts so far."""
        with self._lock:
            return StepLog(**self._numbers)
