"""Contents of a report: plain data, JSON, independent of torch.

Everything here says whether it was predicted or measured, so that no page can mix them up.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from recoup.ir.evidence import Evidence
from recoup.ir.plan import Plan
from recoup.ir.profile import Profile

MOST_ROWS = 1000  # of a table, and points of a curve: a screen shows no more, and a browser is slow with more


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Predicted memory over one step.

    Attributes:
        seconds: when each point begins, by the cost source.
        duration_seconds: when the last one ends.
        series: (category, bytes alive at each point), in stacking order; each point is the largest moment in it.
        phases: (phase, begin, end) in seconds; the phases of a planned step include "replay".
        peak_seconds: when the peak is.
        phase: which phase that is.
        at_peak: (category, bytes) alive there.
        tensors: the largest alive there, as (what, bytes, "file:line" of the code that made it or "").
    """

    seconds: tuple[float, ...]
    duration_seconds: float
    series: tuple[tuple[str, tuple[int, ...]], ...]
    phases: tuple[tuple[str, float, float], ...]
    peak_seconds: float
    peak_bytes: int
    phase: str
    at_peak: tuple[tuple[str, int], ...]
    tensors: tuple[tuple[str, int, str], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimeline:
    """Measured memory over one step, as the device's allocator saw it.

    Attributes:
        seconds: when each point begins.
        total_bytes: bytes allocated there, the largest moment of each point.
        phases: (phase, begin, end) in seconds of the same clock.
        meter: how it was measured.
    """

    seconds: tuple[float, ...]
    total_bytes: tuple[int, ...]
    duration_seconds: float
    phases: tuple[tuple[str, float, float], ...]
    peak_bytes: int
    meter: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One call in the module tree.

    Attributes:
        action: what the plan does with it.
        `is_decided`: the plan names it, else it inherits.
        plain_saved_bytes: held for backward by it and everything inside, without a plan.
        saved_bytes: with it.
        plain_peak_bytes: its part of the bytes alive at the peak of the plain step.
        peak_bytes: its part of the bytes alive at the peak of the planned step.
        count: how many equal calls this is the sum of.
        extra_seconds: time of what runs twice for it and everything inside (predicted).
    """

    path: str
    call: int
    kind: str
    depth: int
    action: str
    is_decided: bool
    plain_saved_bytes: int
    saved_bytes: int
    plain_peak_bytes: int
    peak_bytes: int
    extra_seconds: float
    forward_seconds: float
    count: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A plan on the picture of bytes against time; `name` is "" for the frontier's own points.

    Attributes:
        words: the plan, a line a decision.
        is_exact: it keeps every bit where kernels are deterministic; tiles round.
    """

    name: str
    peak_bytes: int
    extra_time_ratio: float
    num_regions: int
    recomputed_flops: int
    words: tuple[str, ...]
    is_exact: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a report shows.

    Attributes:
        profile: of the plain step.
        plain: predicted timeline of the plain step.
        planned: predicted timeline of the planned step.
        measured_plain: measured timeline of the plain step.
        measured_planned: measured timeline of the planned step.
        frontier: plans from the smallest peak up.
        baselines: the usual plans by hand, simulated as the frontier is.
        capacity_bytes: memory of the device that a program can use; 0 if unknown.
        rows: the module tree in call order.
        plan: the plan; None if there is none.
        evidence: the evidence; None if the plan was not verified.
    """

    title: str
    capacity_bytes: int = 0
    profile: Profile | None = None
    plain: Timeline | None = None
    planned: Timeline | None = None
    measured_plain: MeasuredTimeline | None = None
    measured_planned: MeasuredTimeline | None = None
    frontier: tuple[CurvePoint, ...] = ()
    baselines: tuple[CurvePoint, ...] = ()
    rows: tuple[ModuleRow, ...] = ()
    plan: Plan | None = None
    evidence: Evidence | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {**dataclasses.asdict(self), "plan": self.plan.to_json() if self.plan is not None else None}
