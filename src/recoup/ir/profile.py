"""What `profile` and `frontier` tell: plain data, JSON, independent of torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from recoup.ir.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRow:
    """One call: what it and everything inside it saves and takes."""

    path: str
    call: int
    kind: str
    depth: int
    saved_bytes: int
    forward_seconds: float
    backward_seconds: float
    forward_flops: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Where one unplanned step's memory and time go.

    Attributes:
        at_peak: (category, bytes) alive at the peak. tensors: the largest there, as (what, bytes).
        rows: by call, in call order. timeline: (category, bytes alive at each of the same points in time).
        phases: (phase, first point, last point + 1). saved_bytes: held by autograd when backward begins.
    """

    model_class: str
    device: str
    source: str
    reason: str
    num_parameters: int
    peak_bytes: int
    phase: str
    at_peak: tuple[tuple[str, int], ...]
    tensors: tuple[tuple[str, int], ...]
    rows: tuple[ProfileRow, ...]
    timeline: tuple[tuple[str, tuple[int, ...]], ...]
    phases: tuple[tuple[str, int, int], ...]
    step_seconds: float
    plain_flops: int
    saved_bytes: int
    cost_source: str

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        from recoup.report.text import format_profile  # report/ stands above ir/: only needed when somebody prints

        return format_profile(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One plan on the curve: its peak, its time and what it runs twice."""

    peak_bytes: int
    step_seconds: float
    extra_time_ratio: float
    recomputed_flops: int
    plan: Plan

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {
            "peak_bytes": self.peak_bytes,
            "step_seconds": self.step_seconds,
            "extra_time_ratio": self.extra_time_ratio,
            "recomputed_flops": self.recomputed_flops,
            "plan": self.plan.to_json(),
        }
