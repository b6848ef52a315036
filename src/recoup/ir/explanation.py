"""Explanation of a plan: the worth of each kind of decision, and the plans of nearby budgets. Plain data."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from recoup.ir.text import width
from recoup.units import format_bytes, format_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Price of one kind of choice: the plan against the same plan without it, both simulated.

    Attributes:
        choice: in model terms, e.g. `recompute model.layers.0-7`.
        freed_peak_bytes: by how much the step's peak falls.
        freed_saved_bytes: by how much less autograd holds when backward begins.
        extra_seconds: what it adds to a step.
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
        from_bytes: predicted peak of the first plan.
        to_bytes: predicted peak of the second plan.
        from_seconds: predicted seconds a step of the first plan.
        to_seconds: predicted seconds a step of the second plan.
        to_does: decisions of the second plan in words, one a line.
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

    def __str__(self) -> str:
        """One sentence: what changes between the two plans."""
        change = self.to_bytes - self.from_bytes
        what = f"{format_bytes(abs(change))} {'more' if change >= 0 else 'fewer'} at the peak"
        if self.seconds < 0:
            ratio = -self.seconds / self.from_seconds if self.from_seconds else 0.0
            return f"{what}: {format_seconds(-self.seconds)} a step saved ({100 * ratio:.1f} %)"
        ratio = self.seconds / self.from_seconds if self.from_seconds else 0.0
        return f"{what}: {format_seconds(self.seconds)} a step more ({100 * ratio:.1f} %)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why this plan.

    Attributes:
        peak_bytes: predicted, with the phase where it is and the largest `tensors` there as (what, bytes).
        step_seconds: predicted seconds of a step.
        plain_step_seconds: the same without a plan.
        prices: one for each kind of choice, the dearest second last.
        less: cost of `step_bytes` fewer than the budget, or than the plan needs where it leaves as many; None if no
            plan is that small.
        more: gain of `step_bytes` more; None if the plain step fits already.
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
        """The explanation, at most 100 columns wide."""
        largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.tensors[:4])
        extra = self.step_seconds - self.plain_step_seconds
        lines = [
            f"Peak {format_bytes(self.peak_bytes)}, set by the {self.phase}; largest there: {largest}",
            f"Step {format_seconds(self.step_seconds)}, "
            + (f"{format_seconds(extra)} of it run twice " if extra >= 0 else f"plain {format_seconds(-extra)} more ")
            + f"({self.cost_source})",
            "",
            "What each choice is worth, against the same plan without it:",
            f"  {'freed at peak':>13}  {'freed saved':>12}  {'a step costs':>12}  {'freed per s':>12}  choice",
        ]
        for price in self.prices:
            is_bought = (
                price.freed_peak_bytes < 0 and price.extra_seconds < 0
            )  # a scan that may take more than by itself
            cost_seconds = price.extra_seconds if is_bought else max(price.extra_seconds, 0.0)
            rate = "free" if price.extra_seconds <= 0 else format_bytes(round(price.bytes_per_second))
            rate = "-" if is_bought else rate
            head = (
                f"  {format_bytes(price.freed_peak_bytes):>13}  {format_bytes(price.freed_saved_bytes):>12}  "
                f"{format_seconds(cost_seconds):>12}  {rate:>12}  "
            )
            wrapped = textwrap.wrap(price.choice, width() - len(head)) or [""]
            lines.append(head + wrapped[0])
            lines += [" " * len(head) + rest for rest in wrapped[1:]]
        if not self.prices:
            lines.append("  nothing is changed")
        lines.append("")
        step = format_bytes(self.step_bytes)
        less = "no plan found is that small" if self.less is None else str(self.less)
        lines.append(f"{step} less: {less}")
        more = "buys nothing: this is the plain step" if self.more is None else str(self.more)
        lines.append(f"{step} more: {more}")
        return "\n".join(
            textwrap.fill(line, width(), subsequent_indent="  ") if line[:1] not in (" ", "") else line
            for line in lines
        )
