"""Results of `profile` and `frontier`: plain data, JSON, independent of torch."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from recoup.ir import html
from recoup.ir.advice import advise
from recoup.ir.plan import Plan
from recoup.ir.text import format_rows, format_share, sparkline, width
from recoup.units import format_bytes, format_flops, format_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRow:
    """One call: bytes saved and seconds, calls of submodules included."""

    path: str
    call: int
    kind: str
    depth: int
    saved_bytes: int
    forward_seconds: float
    backward_seconds: float
    forward_flops: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Profile:
    """Where one unplanned step's memory and time go.

    Attributes:
        at_peak: (category, bytes) alive at the peak.
        tensors: the largest there, as (what, bytes).
        rows: by call, in call order.
        timeline: (category, bytes alive at each of the same points in time).
        phases: (phase, first point, last point + 1).
        saved_bytes: held by autograd when backward begins.
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

    def __repr__(self) -> str:
        where = f"peak {format_bytes(self.peak_bytes)} in the {self.phase}"
        return f"<Profile of {self.model_class} on {self.device}: {where}, {format_bytes(self.saved_bytes)} saved>"

    def _repr_html_(self) -> str:
        title = f"{self.model_class} on {self.device}: {format_bytes(self.peak_bytes)}, in the {self.phase}"
        return html.card(title, html.stacked(self.timeline), html.text(str(self), "by module"))

    def __str__(self) -> str:
        """Where memory and time go, in one screen."""
        return format_profile(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One plan on the curve: its peak, its time and what it runs twice."""

    peak_bytes: int
    step_seconds: float
    extra_time_ratio: float
    recomputed_flops: int
    plan: Plan

    @property
    def is_exact(self) -> bool:
        """Whether the plan keeps every bit where kernels are deterministic; one with tiles rounds differently."""
        return all(decision.is_exact for decision in self.plan.decisions)

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {
            "peak_bytes": self.peak_bytes,
            "step_seconds": self.step_seconds,
            "extra_time_ratio": self.extra_time_ratio,
            "recomputed_flops": self.recomputed_flops,
            "plan": self.plan.to_json(),
        }


def format_profile(profile: Profile, *, max_rows: int = 24) -> str:
    """Returns where memory and time go, in one screen."""
    rows = [
        ("peak", f"{format_bytes(profile.peak_bytes)}, in the {profile.phase}"),
        ("saved for backward", format_bytes(profile.saved_bytes)),
        (
            "step",
            f"{format_seconds(profile.step_seconds)}, {format_flops(profile.plain_flops)} ({profile.cost_source})",
        ),
        ("parameters", f"{profile.num_parameters:,}"),
    ]
    at_peak = [
        (f"  {category}", f"{format_bytes(size)} ({format_share(size, profile.peak_bytes)})")
        for category, size in profile.at_peak
    ]
    totals = [sum(values) for values in zip(*(series for _, series in profile.timeline), strict=True)]
    columns = width() - 28  # what is left beside the chart's name
    lines = [
        f"Profile of {profile.model_class} on {profile.device}",
        format_rows(rows),
        "  alive at the peak",
        format_rows(at_peak),
        f"  memory over the step |{sparkline(totals, columns)}|",
        f"  {'':<21}{_phase_marks(profile, len(totals), columns)}",
        "",
        f"  {'saved':>11} {'forward':>9} {'backward':>9}  module",
    ]
    shown = _interesting(profile, max_rows)
    for row in profile.rows:
        if id(row) in shown:
            name = row.path or profile.model_class
            name += f" ({row.kind})" + (f" call {row.call}" if row.call else "")
            lines.append(
                f"  {format_bytes(row.saved_bytes):>11} {format_seconds(row.forward_seconds):>9} "
                f"{format_seconds(row.backward_seconds):>9}  {name}"[: width()]
            )
    left = len(profile.rows) - len(shown)
    if left > 0:
        lines.append(f"  {'':>31}  ... and {left} smaller calls (--json has all)")
    for sentence in advise(profile):
        lines.append(textwrap.fill(f"  {sentence}", width(), subsequent_indent="  "))
    return "\n".join(lines)


def _phase_marks(profile: Profile, num_points: int, columns: int) -> str:
    """Returns a line under the sparkline that says where each phase begins."""
    columns = min(columns, num_points)
    marks = [" "] * (columns + 12)
    for phase, first, _ in profile.phases:
        if phase == "loss" or not num_points:
            continue
        word = f"^{phase}"
        at = first * columns // num_points
        if all(mark == " " for mark in marks[at : at + len(word)]):
            marks[at : at + len(word)] = word
    return " " + "".join(marks).rstrip()


def _interesting(profile: Profile, max_rows: int) -> set[int]:
    ordered = sorted(profile.rows, key=lambda r: (-r.saved_bytes, r.depth))
    return {id(row) for row in ordered[:max_rows]}
